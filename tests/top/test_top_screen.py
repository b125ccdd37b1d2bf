"""The screen in several sizes, with and without color, and in every state of the server."""

from __future__ import annotations

import re
import time

import pytest
from readings import reading, sequence, view
from rich.console import Console

from paged_backend.tools.top.options import TopOptions
from paged_backend.tools.top.screen import draw
from paged_backend.tools.top.source import INSPECT_IS_OFF
from paged_backend.tools.top.watch import Frame, Watch
from paged_backend.values.errors import ConfigError

PREFIX = (1, 2, 3)
SHARING = view(
    *(sequence(f"call-{n}", (*PREFIX, 10 + 2 * n, 11 + 2 * n)) for n in range(4)),
    sequence("late", status="waiting"),
    cached=[50, 51],
)
LATENCIES = {
    "time_to_first_token_seconds": [0.05] * 10,
    "inter_token_latency_seconds": [0.005] * 100,
    "e2e_request_latency_seconds": [0.5] * 9 + [60.0],
}


class Script:
    """A source that says what a test wants, one reading after the other."""

    def __init__(self, *answers):
        self._answers = iter(answers)

    def read(self):
        answer = next(self._answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def frame_of(*answers):
    watch = Watch(Script(*answers))
    for _ in answers:
        frame = watch.try_to_look()
    return frame


def lines_of(frame, width=80, height=24, *, color=False):
    console = Console(
        width=width,
        height=height,
        force_terminal=color,
        color_system="256" if color else None,
    )
    with console.capture() as capture:
        console.print(draw(frame, TopOptions(), width, height))
    return capture.get().splitlines()


def sharing_frame(blocks=SHARING, **counts):
    return frame_of(
        reading(1.0, {"generation_tokens_total": 0}, blocks),
        reading(2.0, {"generation_tokens_total": 470, **counts}, blocks, **LATENCIES),
    )


@pytest.mark.parametrize(("width", "height"), [(70, 20), (80, 24), (120, 40), (200, 60), (300, 20)])
@pytest.mark.parametrize("num_blocks", [100, 5461, 500_001])
@pytest.mark.parametrize("num_sequences", [0, 4, 64])
def test_everything_fits(width, height, num_blocks, num_sequences):
    sequences = [sequence(f"c{n}", (1, 2, *range(3, 9 + n % 40))) for n in range(num_sequences)]
    frame = sharing_frame(view(*sequences, num_blocks=num_blocks), kv_blocks_total=num_blocks - 1)
    lines = lines_of(frame, width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert any(f"{num_blocks - 1:,} KV blocks" in line for line in lines)
    shown = sum("decode" in line for line in lines)
    hidden = [int(line.split()[0]) for line in lines if line.strip().endswith("more")]
    assert shown + sum(hidden) == num_sequences


def test_figures_are_there():
    frame = sharing_frame(num_requests_running=4, num_requests_waiting=1)
    text = "\n".join(lines_of(frame))
    for words in (
        "paged_llm at 127.0.0.1:8001",
        "engine up",
        "4 running, 1 waiting, 0 preempted",
        "3 stop, 3 length",
        "470 tokens/s",
        "TTFT",
        "ITL",
    ):
        assert words in text
    assert "E2E" not in text  # there is no room
    assert ">10 s" in "\n".join(lines_of(frame, 120, 40))


def test_shared_blocks_are_seen_without_color():
    lines = lines_of(sharing_frame())
    first_row = next(line for line in lines if line.startswith("│"))
    free = "·" * 69
    expected = "444" + free[:6] + "aabbccdd" + free[:32] + "░░" + free
    assert first_row == f"│  1 {expected[:73]} │"
    assert any("2-9 + shared 3, saving 9" in line for line in lines)
    tables = [line.split()[-1] for line in lines if "decode" in line]
    assert tables == ["444aa", "444bb", "444cc", "444dd"]
    assert next(line for line in lines if "late" in line).split()[:3] == ["e", "late", "waiting"]


def test_owners_and_sharing_have_colors():
    text = "\n".join(lines_of(sharing_frame(), color=True))
    assert "\x1b[1;30;48;5;226m444\x1b[0m" in text
    assert "\x1b[30;48;5;114maa\x1b[0m" in text and "\x1b[30;48;5;176mbb\x1b[0m" in text


def test_a_long_block_table_is_cut_and_says_so():
    frame = sharing_frame(view(sequence("long", range(1, 90))))
    (row,) = [line for line in lines_of(frame) if "decode" in line]
    assert row.endswith("aaa…") and len(row) == 80


def test_progress_of_a_prompt():
    half = sequence("half", range(1, 11))
    half = type(half)("half", 0, "running", 160, 160, 80, half.block_ids)
    assert "prefill 50%" in "\n".join(lines_of(sharing_frame(view(half))))


def test_a_server_that_shows_no_blocks_shows_the_rest():
    frame = frame_of(reading(1.0), reading(2.0, why_no_view=INSPECT_IS_OFF))
    text = "\n".join(lines_of(frame))
    assert "engine up" in text and "TTFT" in text
    assert "start it with --enable-inspect" in text


def test_a_dead_engine_is_not_overlooked():
    assert "ENGINE DOWN" in lines_of(frame_of(reading(1.0, {"engine_up": 0})))[0]


def test_a_server_that_has_not_answered_yet():
    assert "Asking the server" in "\n".join(lines_of(Frame(0.0)))
    refused = ConfigError("cannot read metrics at http://x: refused")
    head, *rest = lines_of(frame_of(refused, refused))
    assert "NO ANSWER YET" in head
    assert "cannot read metrics at http://x: refused" in "\n".join(rest)


def test_a_server_that_stopped_answering_keeps_its_last_figures():
    good = reading(time.monotonic() - 42, {"num_requests_running": 4}, SHARING)
    lines = lines_of(frame_of(good, ConfigError("cannot read metrics at http://x")), 120, 40)
    shown = re.search(r"NO ANSWER for (\d+) s, trying on", lines[0])
    assert shown is not None and 42 <= int(shown[1]) < 100
    assert lines[1] == "cannot read metrics at http://x"
    assert len(lines) <= 40
    assert "4 running" in "\n".join(lines) and "444aa" in "\n".join(lines)
    back = frame_of(good, ConfigError("gone"), reading(time.monotonic()))
    assert "NO ANSWER" not in "\n".join(lines_of(back))


@pytest.mark.parametrize(("width", "height"), [(69, 40), (120, 19), (20, 5), (1, 1)])
def test_a_terminal_that_is_too_small_is_told_so(width, height):
    text = " ".join(lines_of(sharing_frame(), width, height))
    assert "".join(text.split()).startswith(f"Thisterminalhas{width}columnsand{height}lines")

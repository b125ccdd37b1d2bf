"""The upper part of the screen: load, rates and latencies."""

from __future__ import annotations

import math

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from paged_backend.tools.top import words
from paged_backend.tools.top.figures import WINDOW_S, Figures, Rate, Steps
from paged_backend.tools.top.words import QUIET, line

WIDE = 118  # minimum number of columns to show the latencies next to other figures
TALL = 30  # minimum number of lines to show all latencies
MOST_TELLING = 2  # number of latencies that a smaller screen shows
LATENCY_WIDTH = 62
QUANTILES = (0.5, 0.9, 0.99)


def draw_figures(figures: Figures, width: int, height: int) -> tuple[RenderableType, int]:
    """Draw the figures for a screen of this size; also return the number of lines they take."""
    is_wide = width >= WIDE
    has_room = is_wide or height >= TALL
    latencies = _latencies(figures, len(figures.latencies) if has_room else MOST_TELLING)
    if not is_wide:
        lines = _counts(figures, width) + latencies
        return Group(*lines), len(lines)
    left_width = width - LATENCY_WIDTH - 2
    lines = _counts(figures, left_width)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(width=left_width)
    grid.add_column(width=LATENCY_WIDTH)
    grid.add_row(Group(*lines), Group(*latencies))
    return grid, max(len(lines), len(latencies))


def _counts(figures: Figures, width: int) -> list[Text]:
    lines = {
        "requests": line(
            (words.count(figures.num_running), "bold"),
            " running, ",
            (words.count(figures.num_waiting), "bold"),
            f" waiting, {words.count(figures.num_preemptions)} preempted",
        ),
        "ended": line(", ".join(f"{words.count(n)} {why}" for why, n in figures.finished.items())),
        "output": _rate(figures.generated, width - 28, "green"),
        "prompt": _rate(figures.prompt, width - 28, "blue"),
        "steps": line(_steps(figures.steps)),
        "prefix": line(
            f"hit rate {words.percent(figures.recent_hit_rate)}, "
            f"since start {words.percent(figures.overall_hit_rate)}"
        ),
        "KV cache": _usage(figures, min(max(width - 50, 6), 30)),
    }
    return [line((f"{name:>8}  ", QUIET), text) for name, text in lines.items()]


def _rate(rate: Rate, width: int, style: str) -> Text:
    return line(
        (f"{words.count(rate.now):>7}", "bold"),
        " tokens/s ",
        (words.curve(rate.history, width), style),
    )


def _steps(steps: Steps) -> str:
    if not steps.per_s:
        return "none"
    return (
        f"{words.count(steps.per_s)}/s, each {words.duration(steps.seconds)}, "
        f"{words.decimal(steps.sequences)} sequences, {words.decimal(steps.tokens)} tokens"
    )


def _usage(figures: Figures, width: int) -> Text:
    full = math.ceil(figures.kv_usage * width)
    text = line(
        ("━" * full, "yellow"),
        ("─" * (width - full), QUIET),
        f" {words.percent(figures.kv_usage)} of {words.count(figures.num_blocks)} blocks",
    )
    if figures.kv_usage:
        text.append(f", slots {words.percent(figures.kv_utilization)} filled")
    text.append(f", {words.count(figures.kv_bytes_per_token)} bytes a token")
    return text


def _latencies(figures: Figures, number: int) -> list[Text]:
    names = "".join(f"{f'p{q * 100:g}':>8}" for q in QUANTILES)
    lines = [line((f"{f'last {WINDOW_S:g} s':>9}{names}{'all':>5}{names}", QUIET))]
    for latency in figures.latencies[:number]:
        recent, overall = (
            "".join(f"{words.quantile(histogram, q):>8}" for q in QUANTILES)
            for histogram in (latency.recent, latency.overall)
        )
        lines.append(line((f"{latency.name:>9}", QUIET), f"{recent}{'':5}{overall}"))
    return lines

"""A server of a model that several ranks compute: equal tokens, also when a rank ends or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from callers import QUESTIONS, Ask, Call, Crowd, ask_all, greedy
from servers import (
    LOAD_TIMEOUT_S,
    engine_of,
    is_alive,
    metrics,
    processes_of,
    restarts,
    serve_demo,
    wait_for,
    wait_loaded,
)

from paged_backend.engine.rank_processes import MODULE as RANK_PROCESS
from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server

SEEDED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}


def asks() -> list[Ask]:
    """Greedy and seeded streams, one of them constrained, and answers in one piece."""
    pattern = {"structured_outputs": {"regex": "([a-z]{2,9}, ){20}"}}
    return [
        *(greedy(index, 200) for index in range(6)),
        Ask(QUESTIONS[6], {**SEEDED, "seed": 7, **pattern}),
        Ask(QUESTIONS[7], {**SEEDED, "seed": 8, "n": 2}),
        Ask(QUESTIONS[8], {**SEEDED, "seed": 9, "logprobs": 2}, True),
    ]


def ranks_of(server: RunningServer) -> list[psutil.Process]:
    """The processes of all ranks, in the order of their numbers."""
    commands = [(p.cmdline(), p) for p in processes_of(server)]
    others = {int(line[-2]): p for line, p in commands if RANK_PROCESS in line}
    return [engine_of(server), *(others[number] for number in sorted(others))]


def tokens(calls: list[Call]) -> list[list[tuple[int, ...]]]:
    return [call.token_ids for call in calls]


Fault = Callable[[psutil.Process], None]


def pause(process: psutil.Process) -> None:
    """Stop a process for half a second, which is no reason to end it."""
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGCONT)


FAULTS: dict[str, Fault] = {
    "is killed": lambda process: process.kill(),
    "is stopped": lambda process: process.send_signal(signal.SIGSTOP),
}
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2, "step_timeout_s": 3}
STAGES: dict[str, Any] = TENSOR | {"pipeline_parallel_size": 2}


def hurt(server: RunningServer, crowd: Crowd, what: str, fault: Fault, rank: int) -> None:
    """Do it to a rank under streams, and wait until all ranks have ended and run again."""
    wait_for(lambda: crowd.have_tokens(20), 60)
    before, ranks = restarts(server), ranks_of(server)
    fault(ranks[rank])
    moment = time.monotonic()
    for process in ranks:
        left = "a rank is left behind"
        wait_for(lambda process=process: not is_alive(process), 20, left)
    wait_loaded(server, before + 1)
    loaded_s = time.monotonic() - moment
    print(f"\nrank {rank} {what}: {loaded_s:.1f} s until the next engine is loaded")


def test_a_rank_that_ends_or_hangs_costs_no_stream_a_token(tmp_path: Path) -> None:
    with serve_demo(tmp_path / "one") as server:
        expected = tokens(ask_all(server, asks()))
    with serve_demo(tmp_path / "two", max_crashes_per_request=9, **TENSOR) as server:
        assert tokens(ask_all(server, asks())) == expected
        for what, rank in (("is killed", 0), ("is killed", 1), ("is stopped", 1)):
            with Crowd(server, asks()) as crowd:
                hurt(server, crowd, what, FAULTS[what], rank)
            assert tokens(crowd.calls) == expected, (what, rank)
        with Crowd(server, asks()) as crowd:
            wait_for(lambda: crowd.have_tokens(20), 60)
            pause(ranks_of(server)[1])
        assert tokens(crowd.calls) == expected
        assert restarts(server) == 3, "a rank that is only late does not end"
        # While nobody asks, the end of a rank is noticed, too.
        ranks_of(server)[1].kill()
        wait_loaded(server, 4)
        assert tokens(ask_all(server, asks())) == expected
        no_blocks = "blocks are still in use"
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S, no_blocks)
    with serve_demo(tmp_path / "stages", max_crashes_per_request=9, **STAGES) as server:
        assert tokens(ask_all(server, asks())) == expected
        with Crowd(server, asks()) as crowd:
            hurt(server, crowd, "is killed", FAULTS["is killed"], 3)
        assert tokens(crowd.calls) == expected


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("options", [TENSOR, STAGES], ids=["one stage", "two stages"])
def test_32_streams_survive_ten_faults_of_each_sort_and_rank(
    options: dict[str, Any], tmp_path: Path
) -> None:
    number = int(os.environ.get("RANK_FAULTS", "10"))
    many = [greedy(index, 400) for index in range(32)]
    with serve_demo(tmp_path, instances=2, max_crashes_per_request=50, **options) as server:
        expected = tokens(ask_all(server, many))
        for what, fault in FAULTS.items():
            for rank in range(len(ranks_of(server))):
                for _ in range(number):
                    with Crowd(server, many, timeout_s=600) as crowd:
                        hurt(server, crowd, what, fault, rank)
                    assert tokens(crowd.calls) == expected, (what, rank)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_32_streams_wait_for_a_rank_that_is_late_ten_times(tmp_path: Path) -> None:
    number = int(os.environ.get("RANK_FAULTS", "10"))
    many = [greedy(index, 400) for index in range(32)]
    with serve_demo(tmp_path, instances=2, **STAGES) as server:
        expected = tokens(ask_all(server, many))
        for rank in ranks_of(server):
            for _ in range(number):
                with Crowd(server, many, timeout_s=600) as crowd:
                    wait_for(lambda crowd=crowd: crowd.have_tokens(20), 60)
                    pause(rank)
                assert tokens(crowd.calls) == expected, rank
        assert restarts(server) == 0

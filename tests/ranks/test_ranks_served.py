"""A server of a model that two ranks compute: equal tokens, also when a rank ends or hangs."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from callers import QUESTIONS, Ask, Call, Crowd, ask_all, greedy, print_pauses
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


def rank_of(server: RunningServer) -> psutil.Process:
    """The process of the second rank."""
    found = [p for p in processes_of(server) if "rank_process" in " ".join(p.cmdline())]
    (rank,) = found
    return rank


def tokens(calls: list[Call]) -> list[list[tuple[int, ...]]]:
    return [call.token_ids for call in calls]


def test_a_rank_that_ends_or_hangs_costs_no_stream_a_token(tmp_path: Path) -> None:
    with serve_demo(tmp_path / "one") as server:
        expected = tokens(ask_all(server, asks()))
    options = {"tensor_parallel_size": 2, "step_timeout_s": 3, "max_crashes_per_request": 9}
    with serve_demo(tmp_path / "two", **options) as server:
        assert tokens(ask_all(server, asks())) == expected
        for number, (what, fault) in enumerate(FAULTS.items(), 1):
            with Crowd(server, asks()) as crowd:
                wait_for(lambda crowd=crowd: crowd.have_tokens(20), 60)
                engine, rank = engine_of(server), rank_of(server)
                fault(engine, rank)
                moment = time.monotonic()
                wait_for(lambda engine=engine: not is_alive(engine), 20, "the engine goes on")
                wait_for(lambda rank=rank: not is_alive(rank), 20, "the rank is left behind")
                wait_loaded(server, number)
            assert tokens(crowd.calls) == expected, what
            print_pauses(what, (p.seconds for c in crowd.calls for p in c.pauses([moment])))
        # While nobody asks, the end of a rank is noticed, too.
        rank_of(server).kill()
        wait_loaded(server, len(FAULTS) + 1)
        assert tokens(ask_all(server, asks())) == expected
        assert restarts(server) == len(FAULTS) + 1
        no_blocks = "blocks are still in use"
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S, no_blocks)


FAULTS = {
    "rank 0 is killed": lambda engine, rank: engine.kill(),
    "rank 1 is killed": lambda engine, rank: rank.kill(),
    "rank 0 is stopped": lambda engine, rank: engine.send_signal(signal.SIGSTOP),
    "rank 1 is stopped": lambda engine, rank: rank.send_signal(signal.SIGSTOP),
}

"""A server of a model that several ranks compute: equal tokens, also when a rank ends or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from callers import QUESTIONS, Ask, Call, Crowd, ask_all, greedy
from demo_server import Server
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
        *(greedy(index, 120) for index in range(4)),
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


@pytest.fixture(scope="module")
def expected(server: Server) -> list[list[tuple[int, ...]]]:
    """The tokens of one rank."""
    return tokens(ask_all(server.running, asks()))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("two")
    with serve_demo(folder, max_crashes_per_request=9, **TENSOR) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "two_ranks" in request.fixturenames:
        server, no_blocks = request.getfixturevalue("two_ranks"), "blocks are still in use"
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S, no_blocks)


@pytest.mark.parametrize(
    ("what", "rank"),
    [
        pytest.param("is killed", 0, marks=pytest.mark.thorough),
        ("is killed", 1),
        pytest.param("is stopped", 1, marks=pytest.mark.thorough),
    ],
)
def test_a_rank_that_ends_or_hangs_costs_no_stream_a_token(
    two_ranks: RunningServer, expected: list[list[tuple[int, ...]]], what: str, rank: int
) -> None:
    with Crowd(two_ranks, asks()) as crowd:
        hurt(two_ranks, crowd, what, FAULTS[what], rank)
    assert tokens(crowd.calls) == expected


def test_a_rank_that_is_only_late_does_not_end(
    two_ranks: RunningServer, expected: list[list[tuple[int, ...]]]
) -> None:
    before = restarts(two_ranks)
    with Crowd(two_ranks, asks()) as crowd:
        wait_for(lambda: crowd.have_tokens(20), 60)
        pause(ranks_of(two_ranks)[1])
    assert tokens(crowd.calls) == expected
    assert restarts(two_ranks) == before


@pytest.mark.thorough
def test_the_end_of_a_rank_is_noticed_while_nobody_asks(
    two_ranks: RunningServer, expected: list[list[tuple[int, ...]]]
) -> None:
    before = restarts(two_ranks)
    ranks_of(two_ranks)[1].kill()
    wait_loaded(two_ranks, before + 1)
    assert tokens(ask_all(two_ranks, asks())) == expected


@pytest.mark.thorough
def test_a_rank_of_a_stage_that_is_killed_costs_no_stream_a_token(
    expected: list[list[tuple[int, ...]]], tmp_path: Path
) -> None:
    """`tests/test_helm.py` has two stages of a rank each in each run of the tests."""
    with serve_demo(tmp_path, max_crashes_per_request=9, **STAGES) as server:
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

"""100 adapters are loaded, used and unloaded beside other streams, which nobody else notices."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import median

import psutil
import pytest
from adapter_folders import make_adapter
from callers import QUESTIONS, Ask, Crowd, ask_all, greedy, quantile
from paged_client import Client
from servers import (
    LOAD_TIMEOUT_S,
    MODEL,
    engine_of,
    kill_engine,
    metrics,
    serve_demo,
    stubs_of,
    wait_for,
    wait_loaded,
)

from paged_backend.launch.server_process import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.soak]

NUM_ADAPTERS = 100
NUM_KEPT = 4  # adapters that streams have all the time
NUM_TOKENS = 900
MAX_STALL_S = 0.05
MAX_GROWTH_MIB = 24
NUM_TURNS = 5
BRIEF = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def test_adapters_come_and_go_beside_other_streams(tmp_path: Path) -> None:
    root = tmp_path / "adapters"
    root.mkdir()
    for number in range(NUM_ADAPTERS):
        make_adapter(root / str(number), number)
    options = {"enable_lora": True, "max_loras": 8, "runtime_lora_folder": str(root)}
    with (
        serve_demo(tmp_path, **options) as server,
        Client(server.grpc_url, MODEL, timeout=120) as client,
    ):
        asks = [greedy(0, NUM_TOKENS), greedy(1, NUM_TOKENS)]
        for number in range(NUM_KEPT):
            client.load_adapter(f"kept-{number}", str(number))
            base = greedy(2 + number % 2, NUM_TOKENS)
            asks.append(Ask(base.prompt, {**base.params, "lora_name": f"kept-{number}"}))
        expected = [call.token_ids for call in ask_all(server, asks)]
        answers = come_and_go(client, lambda number: None)  # without other streams
        assert len(set(answers.values())) > NUM_ADAPTERS // 2
        memory = [resident_mib(server)]
        longest: dict[str, list[float]] = {"nothing": [], "requests": [], "loads": []}
        for turn in range(NUM_TURNS):
            for what, found in longest.items():
                gaps = stalls(server, asks, expected, partial(BESIDE[what], client))
                show(f"turn {turn}, {what} beside", gaps)
                found.append(max(gaps))
            assert come_and_go(client, lambda number: None) == answers
            memory.append(resident_mib(server))
        assert median(longest["loads"]) < median(longest["requests"]) + MAX_STALL_S
        print("resident MiB of the engine and the front end:", memory)
        assert all(
            last < second + MAX_GROWTH_MIB
            for last, second in zip(memory[-1], memory[1], strict=True)
        )
        with Crowd(server, asks) as crowd:
            wait_for(lambda: crowd.have_tokens(10), LOAD_TIMEOUT_S)
            killed = come_and_go(
                client, lambda number: kill_engine(server) if number == NUM_ADAPTERS // 2 else None
            )
        assert killed == answers
        assert [call.token_ids for call in crowd.calls] == expected
        wait_loaded(server, 1)
        assert set(client.info().adapters) == {f"kept-{number}" for number in range(NUM_KEPT)}
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S)


def come_and_go(client: Client, between: Callable[[int], object]) -> dict[int, tuple[int, ...]]:
    """Load, use and unload each adapter; returns the tokens of each."""
    answers = {}
    for number in range(NUM_KEPT, NUM_ADAPTERS):
        client.load_adapter("passing", str(number))
        between(number)
        completion = client.generate(QUESTIONS[4], lora_name="passing", **BRIEF)
        answers[number] = completion.token_ids
        client.unload_adapter("passing")
    return answers


def come_and_go_until(client: Client, ended: Callable[[], bool]) -> None:
    """Load, use and unload adapters until other streams have ended."""
    for number in cycle(range(NUM_KEPT, NUM_ADAPTERS)):
        if ended():
            return
        client.load_adapter("passing", str(number))
        client.generate(QUESTIONS[4], lora_name="passing", **BRIEF)
        client.unload_adapter("passing")


def stay_until(client: Client, ended: Callable[[], bool]) -> None:
    """Send the same requests to an adapter that stays."""
    while not ended():
        client.generate(QUESTIONS[4], lora_name="kept-0", **BRIEF)
        time.sleep(0.02)  # about what a load and an unload take


BESIDE: dict[str, Callable[[Client, Callable[[], bool]], None]] = {
    "nothing": lambda client, ended: None,
    "requests": stay_until,
    "loads": come_and_go_until,
}


def stalls(
    server: RunningServer,
    asks: Sequence[Ask],
    expected: Sequence[object],
    beside: Callable[[Callable[[], bool]], None],
) -> list[float]:
    """Return the gaps between the tokens of streams, in seconds; ``beside`` runs meanwhile."""
    with Crowd(server, asks) as crowd:
        wait_for(lambda: crowd.have_tokens(10), LOAD_TIMEOUT_S)
        started = time.monotonic()
        beside(lambda: any(call.has_ended for call in crowd.calls))
    assert [call.token_ids for call in crowd.calls] == expected
    return [
        later - earlier
        for call in crowd.calls
        for earlier, later in zip(call.arrivals, call.arrivals[1:], strict=False)
        if earlier > started
    ]


def show(what: str, gaps: Sequence[float]) -> None:
    parts = " ".join(f"p{100 * p:g} {1e3 * quantile(gaps, p):.1f}" for p in (0.5, 0.99, 0.999))
    print(f"{what}: {len(gaps)} gaps, ms: {parts} max {1e3 * max(gaps):.1f}", flush=True)


def resident_mib(server: RunningServer) -> list[int]:
    """Return the memory of the engine and of the front end."""
    (stub,) = stubs_of(server)
    processes: list[psutil.Process] = [engine_of(server), stub]
    return [process.memory_info().rss >> 20 for process in processes]

"""Ten times the requests that a server can answer: some are answered in time, all others refused
at once, and it is over when the load is."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from callers import quantile
from servers import metrics, serve_demo, wait_for
from wires import WIRES, WireCall, at_a_rate

from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server

PARAMS = {"max_tokens": 96, "ignore_eos": True, "temperature": 0}  # heavy, so that callers are few
FACTOR = 10
REFUSED_WITHIN_S = 0.05
BACK_WITHIN_S = 2.0
ROUNDS = 3  # rounds of full seats, to find out what the server can do
SLACK = 1.5  # factor of the bound: the refusals, and the callers, take their part of the two cores
CALL_TIMEOUT_S = 60.0


@dataclass
class Outcomes:
    """What callers got, seconds after each had asked, and how late they themselves were."""

    accepted_s: list[float] = field(default_factory=list)  # to the first token
    refused_s: list[float] = field(default_factory=list)
    failed: list[bytes] = field(default_factory=list)
    lags_s: list[float] = field(default_factory=list)

    async def ask(self, server: RunningServer, wire: str) -> None:
        """One request, to its end."""
        call = await WireCall.start(server, wire, PARAMS)
        try:
            await call.wait(CALL_TIMEOUT_S)
        finally:
            call.close()
        if b"queue_full: " in call.received:
            self.refused_s.append(call.ttft_s)
        elif call.arrivals and b"error" not in call.received:
            self.accepted_s.append(call.ttft_s)
        else:
            self.failed.append(bytes(call.received[-300:]))

    async def watch_own_lag(self) -> None:
        """How much later than it asked for this process gets its turn."""
        while True:
            due_s = time.monotonic() + 0.01
            await asyncio.sleep(0.01)
            self.lags_s.append(time.monotonic() - due_s)


async def measured_rate(server: RunningServer, seats: int) -> float:
    """Requests a second that are answered while all seats are taken, and none is refused."""
    outcomes = Outcomes()
    started_s = time.monotonic()

    async def caller(index: int) -> None:
        for _ in range(ROUNDS):
            await outcomes.ask(server, WIRES[index % 2])

    await asyncio.gather(*map(caller, range(seats)))
    assert len(outcomes.accepted_s) == seats * ROUNDS, outcomes
    return seats * ROUNDS / (time.monotonic() - started_s)


async def burst(server: RunningServer, rate: float, seconds: float) -> tuple[Outcomes, float]:
    """An open loop, in which who asks does not wait for those before; and what comes after it."""
    outcomes = Outcomes()
    normal_s = max([await ttft_of_one(server) for _ in range(5)])
    watch = asyncio.create_task(outcomes.watch_own_lag())

    async def caller(index: int) -> None:
        await outcomes.ask(server, WIRES[index % 2])

    offered = asyncio.create_task(at_a_rate(rate, int(rate * seconds), caller))
    await asyncio.sleep(seconds)
    back_s = await back_after(server, normal_s)
    faults = await offered
    watch.cancel()
    assert not faults, faults[:3]
    return outcomes, back_s


async def ttft_of_one(server: RunningServer) -> float:
    """Of a request that finds the queue as it is; endless where it is refused."""
    call = await WireCall.start(server, "grpc", {**PARAMS, "max_tokens": 1})
    await call.wait(CALL_TIMEOUT_S)
    call.close()
    return math.inf if b"queue_full" in call.received else call.ttft_s


async def back_after(server: RunningServer, normal_s: float) -> float:
    """Seconds until a request has its first token about as soon as before the burst."""
    ended_s = time.monotonic()
    while (began_s := time.monotonic() - ended_s) < 4 * BACK_WITHIN_S:
        if await ttft_of_one(server) < 2 * normal_s + 0.02:
            return began_s
        await asyncio.sleep(0.02)
    return math.inf


# Few seats need few callers: beside other tests, many callers would wait for each other.
@pytest.mark.parametrize(
    ("seats", "seconds", "is_timed"),
    [(2, 2.5, False), pytest.param(8, 60.0, True, marks=pytest.mark.soak)],  # timed when quiet
)
def test_excess_requests_are_refused_fast_at_ten_times_the_load(
    tmp_path: Path, seats: int, seconds: float, is_timed: bool
) -> None:
    with serve_demo(tmp_path, max_num_seqs=seats, max_waiting_requests=seats) as server:
        rate = asyncio.run(measured_rate(server, seats))
        outcomes, back_s = asyncio.run(burst(server, FACTOR * rate, seconds))
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 60)
        after_s = asyncio.run(ttft_of_one(server))
    # Who is accepted waits for those in the queue and for a seat.
    bound_s = SLACK * 2 * seats / rate
    accepted_s, refused_s, lag_s = (
        quantile(values, 0.99)
        for values in (outcomes.accepted_s, outcomes.refused_s, outcomes.lags_s)
    )
    num_accepted, num_refused = len(outcomes.accepted_s), len(outcomes.refused_s)
    print(f"\n{rate:.1f} a second can be served, {FACTOR * rate:.0f} came for {seconds:g} s")
    print(f"{num_accepted} accepted, TTFT p99 {accepted_s:.2f} s, bound {bound_s:.2f} s")
    print(f"{num_refused} refused, p99 {refused_s * 1e3:.0f} ms, caller late {lag_s * 1e3:.0f} ms")
    print(f"latency back after {back_s:.1f} s")
    assert not outcomes.failed, outcomes.failed[:3]
    assert num_accepted > 2 * seats  # more than the first to come
    assert num_refused > rate * seconds
    assert after_s < math.inf, "refused though nobody asks any more"
    assert quantile(outcomes.refused_s, 0.5) < quantile(outcomes.accepted_s, 0.5) / 2
    if is_timed:
        assert num_accepted > rate * seconds / 3
        assert accepted_s < bound_s
        assert refused_s < REFUSED_WITHIN_S
        assert back_s < BACK_WITHIN_S

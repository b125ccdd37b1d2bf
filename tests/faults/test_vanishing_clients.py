"""Clients that connect, ask and vanish at a random moment leave nothing behind."""

from __future__ import annotations

import asyncio
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from servers import metrics, processes_of, serve_demo, wait_for
from wires import WIRES, WireCall, at_a_rate

from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server

RATE = 120.0  # a second; above 250 cancelled requests a second tritonserver 24.10's gRPC breaks
SEATS = 16  # so that most vanish while they wait for one
LONGEST_STAY_S = 1.0
PARTIAL = 0.1  # share of the clients that are gone before the server has all of their request
SETTLE_S = 30.0
STEADY_S = 2.0
PARAMS = {"max_tokens": 400, "ignore_eos": True, "temperature": 0}
WAYS = (WireCall.close, WireCall.reset, WireCall.cancel)


@dataclass(frozen=True)
class Holdings:
    """What the processes of a server hold, by process."""

    threads: dict[int, int]
    descriptors: dict[int, int]
    resident_mib: dict[int, float]
    regions: int

    @classmethod
    def of(cls, server: RunningServer) -> Holdings:
        processes = [psutil.Process(server.pid), *processes_of(server)]
        return cls(
            {p.pid: p.num_threads() for p in processes},
            {p.pid: p.num_fds() for p in processes},
            {p.pid: p.memory_info().rss / 2**20 for p in processes},
            len(set().union(*map(_regions, processes))),
        )

    def more_than(self, before: Holdings) -> list[str]:
        """What any process holds more of, or is new."""
        more = [f"regions: {self.regions}"] * (self.regions > before.regions)
        for name in ("threads", "descriptors"):
            then = getattr(before, name)
            for pid, number in getattr(self, name).items():
                if number > then.get(pid, 0):
                    more.append(f"{name} of {pid}: {number} > {then.get(pid, 0)}")
        return more

    def growth(self, before: Holdings) -> float:
        """By which part the resident memory of that process is more that has grown most."""
        still = self.resident_mib.keys() & before.resident_mib.keys()
        return max(self.resident_mib[pid] / before.resident_mib[pid] for pid in still) - 1


def _regions(process: psutil.Process) -> set[str]:
    """The shared memory that a process has mapped."""
    return set(re.findall(r"/dev/shm/\S+", Path(f"/proc/{process.pid}/maps").read_text()))


class Visitors:
    """Clients that vanish, each in its own way, and how far they had come by then."""

    def __init__(self, server: RunningServer, seed: int) -> None:
        self._server = server
        self._draw = random.Random(seed)
        self.heard = {"nothing": 0, "a part": 0}

    async def visit(self, index: int) -> None:
        """Come, ask, and leave."""
        draw = self._draw
        pieces = draw.randint(1, 2) if draw.random() < PARTIAL else None
        way, stay_s = draw.choice(WAYS), draw.random() * LONGEST_STAY_S
        # How much is heard within a second depends on the machine: some do not wait for anything,
        # and some until they have heard something.
        hears = {0: False, 1: True}.get(index % 8)
        call = await WireCall.start(self._server, WIRES[draw.randrange(2)], PARAMS, pieces=pieces)
        if hears is not False:
            await asyncio.sleep(stay_s)
        while hears and call.connected and not pieces and not call.arrivals:
            await asyncio.sleep(0.01)
        if call.connected:
            self.heard["nothing" if not call.arrivals else "a part"] += 1
            way(call)
        else:  # the server may end a connection on which it was not told what is wanted
            assert pieces, f"cut off after {bytes(call.received)!r}"

    def come(self, number: int) -> None:
        """All of them, at the bounded rate."""
        faults = asyncio.run(at_a_rate(RATE, number, self.visit))
        assert not faults, faults[:3]


def settle(server: RunningServer) -> None:
    """Until the engine has nothing more to do."""

    def is_idle() -> bool:
        shown = metrics(server)
        names = ("kv_blocks_used", "num_requests_running", "num_requests_waiting")
        return not any(shown[name] for name in names)

    wait_for(is_idle, SETTLE_S, "the engine works for clients that are gone")


def steady(server: RunningServer) -> Holdings:
    """What it holds once that has not grown for a while: processes start in the background.

    The memory of a process that starts grows before it opens its pipes.
    """
    held, since_s = Holdings.of(server), time.monotonic()
    while time.monotonic() < since_s + STEADY_S:
        time.sleep(0.2)
        now = Holdings.of(server)
        if now.more_than(held) or now.growth(held) > 0.01:
            held, since_s = now, time.monotonic()
    return now


@pytest.mark.parametrize(
    ("number", "growth"), [(100, None), pytest.param(5000, 0.05, marks=pytest.mark.soak)]
)
def test_clients_that_vanish_leave_no_requests_blocks_or_memory(
    tmp_path: Path, number: int, growth: float | None
) -> None:
    with serve_demo(tmp_path, instances=2, max_num_seqs=SEATS) as server:
        visitors = Visitors(server, seed=number)
        visitors.come(max(100, number // 5))  # threads, buffers, caches grow to what is needed
        settle(server)
        before = steady(server)
        visitors.come(number)
        settle(server)
        deadline_s = time.monotonic() + SETTLE_S
        while (after := Holdings.of(server)).more_than(before) and time.monotonic() < deadline_s:
            time.sleep(0.2)
    print(f"\n{number} clients heard {visitors.heard}; before {before}; after {after}")
    assert not after.more_than(before)
    assert min(visitors.heard["nothing"], visitors.heard["a part"]) > number // 20
    assert set(after.threads) == set(before.threads), "a process was replaced"
    if growth is not None:
        assert after.growth(before) < growth

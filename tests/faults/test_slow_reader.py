"""A caller that reads one message a second, beside 32 that read all they get."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from callers import quantile
from servers import metrics, serve_demo, wait_for
from wires import WIRES, WireCall

from paged_backend.launch.server_process import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.soak]

FAST = 32
PAIRS = 12  # pairs of rounds with and without, in turn
PARAMS = {"max_tokens": 250, "ignore_eos": True, "temperature": 0}
MESSAGE_BYTES = 160  # about one response
ALL_BYTES = 2**20  # more than an answer has
RECEIVE_BUFFER = 2048  # the kernel's least
MAX_RATIO = 1.10
# What the server may hold for each response that is not read: its tensors and its message.
HELD_BYTES = 4096


async def read_slowly(call: WireCall) -> None:
    """About one message a second, until the task is cancelled."""
    while True:
        call.pause()
        await asyncio.sleep(1)
        call.resume(MESSAGE_BYTES)
        await asyncio.sleep(0.001)


async def round_of(server: RunningServer, slow_wire: str | None) -> tuple[list[float], int]:
    """The gaps between the responses of the fast; one more caller is slow, or as fast as they.

    Beside them the server's memory in bytes once all is computed, whether read or not.
    """
    calls = [await WireCall.start(server, "grpc", PARAMS) for _ in range(FAST)]
    wire, window = (slow_wire, MESSAGE_BYTES) if slow_wire else ("grpc", 2**31 - 1)
    other = await WireCall.start(
        server,
        wire,
        PARAMS,
        window=window,
        receive_buffer=RECEIVE_BUFFER if slow_wire else None,
    )
    reading = asyncio.create_task(read_slowly(other)) if slow_wire else None
    for call in calls:
        await call.wait(60)
        assert b"error" not in call.received
        call.close()
    held = psutil.Process(server.pid).memory_info().rss
    if reading is not None:
        assert len(other.arrivals) < PARAMS["max_tokens"] / 5, "it was not slow"
        reading.cancel()
        other.resume(ALL_BYTES)
    # To the end: 24.10 now and then crashes over a stream that is cut while much of it waits.
    await other.wait(60)
    other.close()
    return [gap for call in calls for gap in gaps_of(call)], held


def gaps_of(call: WireCall) -> Iterator[float]:
    return (end - start for start, end in zip(call.arrivals, call.arrivals[1:], strict=False))


@pytest.mark.parametrize("wire", WIRES)
def test_a_slow_reader_delays_no_other_stream(tmp_path: Path, wire: str) -> None:
    with serve_demo(tmp_path, max_num_seqs=FAST + 1) as server:

        async def measured(kind: str | None) -> tuple[float, int]:
            """p99 of the gaps, and by how many bytes the server grew."""
            before = psutil.Process(server.pid).memory_info().rss
            gaps, held = await round_of(server, kind)
            return quantile(gaps, 0.99), held - before

        async def rounds() -> tuple[list[float], list[int]]:
            ratios, grown = [], []
            for kind in (None, wire):  # threads, buffers and caches grow up to what is needed
                await round_of(server, kind)
            for index in range(PAIRS):
                kinds = (None, wire) if index % 2 else (wire, None)
                found = {kind: await measured(kind) for kind in kinds}
                (p99, bytes_with), (p99_without, bytes_without) = found[wire], found[None]
                print(f"p99 with {p99 * 1e3:.1f} ms, without {p99_without * 1e3:.1f} ms")
                ratios.append(p99 / p99_without)
                grown.append(bytes_with - bytes_without)
            return ratios, grown

        print()
        ratios, differences = asyncio.run(rounds())
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 5)
    ratio, grown = statistics.median(ratios), statistics.median(differences)
    print(
        f"{wire}: p99 with / without {ratio:.3f}; the server grew by {grown / 2**20:.2f} MiB more"
    )
    assert ratio < MAX_RATIO
    assert grown < PARAMS["max_tokens"] * HELD_BYTES

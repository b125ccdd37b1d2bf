"""A client that abuses a server, and the streams and new requests of others beside it (Show 2).

Latencies are compared with those of an undisturbed time of the same run, just before. The time to
a new request's first token is asserted. The gaps within streams are printed beside those next to a
process that only uses a core: on two cores, which clients and server share, that alone shows.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from abuser import CONTROL, GATEWAY, TRITON
from callers import quantile
from gateway.gateways import Gateway, running_gateway
from servers import MODEL, metrics, processes_of, serve_demo, wait_for

from paged_backend.launch.server_process import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.soak]

SECONDS = 20.0
SHAPES = list(filter(None, os.environ.get("ABUSE_SHAPES", "").split(";"))) or [
    *(CONTROL, *TRITON, *GATEWAY)
]
PAUSE_S = 0.25  # between two new requests
TTFT_SLACK_S = 0.5
ABUSER = Path(__file__).with_name("abuser.py")
QUESTION = "What does os.getcwd do?"
ENDLESS = {"temperature": 0, "max_tokens": 1900, "ignore_eos": True, "stream": True}


@dataclass
class Latencies:
    """What well-behaved callers saw, in seconds."""

    gaps: list[float] = field(default_factory=list)  # between the tokens of a stream
    first: list[float] = field(default_factory=list)  # from a new request to its first token

    def __str__(self) -> str:
        p50, p99 = quantile(self.gaps, 0.5), quantile(self.gaps, 0.99)
        return (
            f"ITL p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f} ms of {len(self.gaps)}; TTFT p50 "
            f"{1e3 * statistics.median(self.first):.0f} ms, max {1e3 * max(self.first):.0f} ms "
            f"of {len(self.first)}"
        )


@dataclass(frozen=True)
class Door:
    """One of the ways to the model, and how a prompt is asked there."""

    address: str
    path: str
    fields: dict[str, Any]

    async def ask(self, **fields: Any) -> list[float]:
        """Ask for a stream; the moments of asking and of each event."""
        host, _, port = self.address.rpartition(":")
        body = json.dumps(self.fields | fields).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        moments = [time.monotonic()]
        try:
            head = f"POST {self.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert b"200" in await reader.readline()
            async for line in reader:
                if line.startswith(b"data: "):
                    assert not line.startswith(b'data: {"error"'), line
                    moments.append(time.monotonic())
                if line.strip() == b"0":
                    break
        finally:
            writer.close()
        return moments


def doors_of(server: RunningServer, gateway: Gateway) -> list[Door]:
    """The model's own door, and the gateway's two."""
    return [
        Door(
            server.http_url.removeprefix("http://"),
            f"/v2/models/{MODEL}/generate_stream",
            {"text_input": QUESTION},
        ),
        Door(gateway.address, "/v1/completions", {"prompt": QUESTION}),
        Door(
            gateway.address,
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": QUESTION}]},
        ),
    ]


async def watch(doors: list[Door], during: Callable[[], Awaitable[None]]) -> Latencies:
    """Four streams that begin again when they end, and new requests, while something goes on."""
    seen, over = Latencies(), asyncio.Event()

    async def stream(door: Door) -> None:
        while not over.is_set():
            _, *moments = await door.ask(**ENDLESS)
            seen.gaps += [after - before for before, after in pairwise(moments)]

    async def newcomer() -> None:
        for number in range(10**6):
            asked, first, *_ = await doors[number % len(doors)].ask(max_tokens=2, stream=True)
            seen.first.append(first - asked)
            await asyncio.sleep(PAUSE_S)
            if over.is_set():
                return

    streams = [asyncio.create_task(stream(doors[number % 2])) for number in range(4)]
    news = asyncio.create_task(newcomer())
    await during()
    over.set()
    await asyncio.gather(*streams, news)
    return seen


async def nothing() -> None:
    await asyncio.sleep(SECONDS)


def abuse(shape: str, server: RunningServer, gateway: Gateway) -> Callable[[], Awaitable[None]]:
    async def run() -> None:
        arguments = [shape, str(SECONDS), server.http_url.removeprefix("http://"), gateway.address]
        process = await asyncio.create_subprocess_exec(
            *("nice", "-n", "19", sys.executable, str(ABUSER), *arguments),
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ABUSER.parents[1])},
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        print(f"\n{shape}: {out.decode().strip()}")

    return run


@pytest.mark.timeout(1200)
def test_others_hardly_notice_an_abusive_client(tmp_path: Path) -> None:
    breaches = []
    with (
        serve_demo(tmp_path) as server,
        running_gateway("--triton", server.grpc_url) as gateway,
    ):
        doors = doors_of(server, gateway)
        asyncio.run(watch(doors, lambda: asyncio.sleep(3)))  # what is made once is there now
        for shape in SHAPES:
            before = asyncio.run(watch(doors, nothing))
            beside = asyncio.run(watch(doors, abuse(shape, server, gateway)))
            ratio = quantile(beside.gaps, 0.99) / quantile(before.gaps, 0.99)
            later_s = statistics.median(beside.first) - statistics.median(before.first)
            latest_s = max(beside.first) - max(before.first)
            print(f"  before: {before}\n  beside: {beside}\n  ITL p99 {ratio:.2f} times")
            if max(later_s, latest_s) > TTFT_SLACK_S:
                breaches.append((shape, later_s, latest_s))
        resident = sum(p.memory_info().rss for p in processes_of(server)) / 2**20
        print(f"all processes: {resident:.0f} MiB")
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 30)
    assert not breaches

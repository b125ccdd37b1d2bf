"""Well-behaved callers at the time of an abuse: four streams, and new requests in turn."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from callers import quantile
from gateway.gateways import Gateway
from servers import MODEL

from paged_backend.launch.server_process import RunningServer

PAUSE_S = 0.25  # between two new requests
QUESTION = "What does os.getcwd do?"
_ENDLESS = {"temperature": 0, "max_tokens": 1900, "ignore_eos": True, "stream": True}


@dataclass
class Latencies:
    """What well-behaved callers saw, in seconds."""

    gaps: list[float] = field(default_factory=list)  # between the tokens of a stream
    first: list[float] = field(default_factory=list)  # from a new request to its first token

    def __str__(self) -> str:
        p50, p99 = quantile(self.gaps, 0.5), quantile(self.gaps, 0.99)
        return (
            f"ITL p50 {1e3 * p50:.1f} ms, p99 {1e3 * p99:.1f}, max {1e3 * max(self.gaps):.0f} ms "
            f"of {len(self.gaps)}; TTFT p50 {1e3 * statistics.median(self.first):.0f} ms, "
            f"max {1e3 * max(self.first):.0f} ms of {len(self.first)}"
        )


@dataclass(frozen=True)
class Door:
    """One of the ways to the model, and how a prompt is asked there."""

    address: str
    path: str
    fields: dict[str, Any]
    key: str = ""  # API key of the gateway

    async def ask(self, **fields: Any) -> list[float]:
        """Ask for a stream; returns the moments of asking and of each event."""
        host, _, port = self.address.rpartition(":")
        body = json.dumps(self.fields | fields).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        moments = [time.monotonic()]
        try:
            head = f"POST {self.path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            if self.key:
                head += f"Authorization: Bearer {self.key}\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            status = await reader.readline()
            assert b"200" in status, status
            async for line in reader:
                if line.startswith(b"data: "):
                    assert not line.startswith(b'data: {"error"'), line
                    moments.append(time.monotonic())
                if line.strip() == b"0":
                    break
        finally:
            writer.close()
        return moments


def doors_of(server: RunningServer, gateway: Gateway, key: str = "") -> list[Door]:
    """Return the model's own door, and the gateway's two."""
    chat = {"messages": [{"role": "user", "content": QUESTION}]}
    return [
        Door(
            server.http_url.removeprefix("http://"),
            f"/v2/models/{MODEL}/generate_stream",
            {"text_input": QUESTION},
        ),
        Door(gateway.address, "/v1/completions", {"prompt": QUESTION}, key),
        Door(gateway.address, "/v1/chat/completions", chat, key),
    ]


async def watch(doors: Sequence[Door], during: Callable[[], Awaitable[None]]) -> Latencies:
    """Keep four streams open, and ask anew, while something goes on.

    The streams use the first two doors, and begin again when they end. The new requests use all.
    """
    seen, over = Latencies(), asyncio.Event()

    async def stream(door: Door) -> None:
        while not over.is_set():
            _, *moments = await door.ask(**_ENDLESS)
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

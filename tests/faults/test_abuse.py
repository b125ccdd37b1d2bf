"""A client that abuses a server, and the latencies of other clients at the same time.

They are compared with the latencies just before, without abuse. The time to a new request's first
token is asserted. The gaps within streams are only printed, together with the gaps while a process
merely uses a core: clients and server share two cores, so that such a process shows, too.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from abuser import CONTROL, GATEWAY, TRITON
from bystanders import doors_of, watch
from callers import quantile
from gateway.gateways import Gateway, running_gateway
from servers import metrics, processes_of, serve_demo, wait_for

from paged_backend.launch.server_process import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.soak]

SECONDS = 20.0
SHAPES = list(filter(None, os.environ.get("ABUSE_SHAPES", "").split(";"))) or [
    *(CONTROL, *TRITON, *GATEWAY)
]
TTFT_SLACK_S = 0.5
ABUSER = Path(__file__).with_name("abuser.py")


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

"""A tenant that floods the server, and another who does not notice much of it.

The measure is what the quiet tenant has alone on a fair half of the machine: a server on one of the
two cores that the flooded one has, with half of its seats, half of its tokens a step and half of
its blocks, which nobody else asks. The clients have both cores in each case.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from callers import quantile
from paged_client import AsyncClient, Unavailable
from servers import MODEL, serve_demo

pytestmark = [pytest.mark.server, pytest.mark.soak]

CORES = sorted(os.sched_getaffinity(0))[:2]
SEATS, STEP_TOKENS, CACHE_BYTES = 32, 256, 2**28
RATE = 1.25  # requests of the quiet tenant a second: about a third of its share
FLOOD = 50  # times as many
SECONDS = 40.0
WAITING = 256  # a queue that floods can fill, but for every ninth place
QUIET_TOKENS, FLOOD_TOKENS = (800, 16), (32, 200)  # lengths of prompt and answer
MAX_FACTOR = 2.0


@dataclass
class Tenant:
    """Someone who asks at a rate, whatever comes of it."""

    name: str
    rate: float
    num_prompt_tokens: int
    num_output_tokens: int
    whole: bool = False  # hears an answer in one piece, so that listening takes little of the cores
    ttfts_s: list[float] = field(default_factory=list)
    num_given_up: int = 0  # which had to wait until the end
    errors: list[str] = field(default_factory=list)

    async def ask_for(self, client: AsyncClient, seconds: float) -> None:
        """Ask until the time is over; answers that are open then are given up."""
        draw = random.Random(self.name)
        due_s = time.monotonic()
        end_s = due_s + seconds
        tasks: list[asyncio.Task[None]] = []
        while (due_s := due_s + draw.expovariate(self.rate)) < end_s:
            await asyncio.sleep(due_s - time.monotonic())
            prompt = [draw.randrange(8, 2048) for _ in range(self.num_prompt_tokens)]
            tasks.append(asyncio.create_task(self._ask(client, prompt, end_s)))
        await asyncio.gather(*tasks)

    async def _ask(self, client: AsyncClient, prompt: list[int], end_s: float) -> None:
        sent_s = time.monotonic()
        options = {"temperature": 0.0, "max_tokens": self.num_output_tokens, "ignore_eos": True}
        ttft_s = None
        try:
            async with asyncio.timeout(end_s - sent_s + 1.0):
                async with client.stream(
                    prompt, whole=self.whole, tenant=self.name, **options
                ) as stream:
                    async for _ in stream:
                        ttft_s = ttft_s or time.monotonic() - sent_s
        except TimeoutError:
            self.num_given_up += ttft_s is None
        except Unavailable as error:  # as good as given up
            self.errors.append(str(error))
            ttft_s = end_s - sent_s + 1.0
        self.ttfts_s.append(ttft_s or time.monotonic() - sent_s)  # at least so long

    @property
    def p99_s(self) -> float:
        return quantile(self.ttfts_s, 0.99)

    def __str__(self) -> str:
        p50_ms, p99_ms = quantile(self.ttfts_s, 0.5) * 1e3, self.p99_s * 1e3
        return (
            f"{self.name}: {len(self.ttfts_s)} requests, {len(self.errors)} refused, "
            f"{self.num_given_up} given up, TTFT p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms"
        )


@contextmanager
def cores(wanted: list[int]) -> Iterator[None]:
    """Processes that are started here stay on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, wanted)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def quiet_under(folder: Path, halves: int, policy: str, *, flooded: bool) -> Tenant:
    """What the quiet tenant hears from a server of one half or two."""
    quiet = Tenant("quiet", RATE, *QUIET_TOKENS)
    flood = Tenant("flood", RATE * FLOOD, *FLOOD_TOKENS, whole=True)

    async def ask(url: str) -> None:
        async with AsyncClient(url, MODEL) as client:
            await Tenant("warm", 4.0, *QUIET_TOKENS).ask_for(client, 2.0)
            tenants = [quiet, flood] if flooded else [quiet]
            await asyncio.gather(*(tenant.ask_for(client, SECONDS) for tenant in tenants))

    demo = serve_demo(
        folder / policy / str(halves),
        scheduling_policy=policy,
        max_num_seqs=SEATS * halves,
        max_num_batched_tokens=STEP_TOKENS * halves,
        kv_cache_memory_bytes=CACHE_BYTES * halves,
        max_waiting_requests=WAITING,
    )
    with ExitStack() as stack:
        with cores(CORES[:halves]):
            server = stack.enter_context(demo)
        asyncio.run(ask(server.grpc_url))
    print(f"\n{policy}, {halves} of 2 halves: {quiet}", *([flood] if flooded else []), sep="\n  ")
    return quiet


def test_a_flood_of_one_tenant_does_not_delay_another(tmp_path: Path) -> None:
    alone = quiet_under(tmp_path, 1, "fair", flooded=False)
    fair = quiet_under(tmp_path, 2, "fair", flooded=True)
    unfair = quiet_under(tmp_path, 2, "priority", flooded=True)
    assert not alone.errors and not fair.errors
    assert fair.p99_s < MAX_FACTOR * alone.p99_s < unfair.p99_s

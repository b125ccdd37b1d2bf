"""Sends a workload: at its own arrival times, at a rate, or as fast as the concurrency allows."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import numpy as np

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import PagedError
from paged_loadtest.endpoints import Endpoint
from paged_loadtest.options import LoadOptions
from paged_loadtest.timeline import Timeline


class ServerLost(PagedError, RuntimeError):
    """Raised when the server stops answering in the middle of a run."""


def arrival_times(requests: Sequence[WorkloadRequest], load: LoadOptions, seed: int) -> list[float]:
    """When each request is due, in seconds from the start of the run; 0 means at once.

    Gaps at a given rate are scaled so that their sum is the same for every seed.
    """
    if all(request.arrival_s is not None for request in requests):
        return [request.arrival_s or 0.0 for request in requests]
    if load.rate is None:
        return [0.0] * len(requests)
    gaps = np.random.default_rng(seed).gamma(load.burstiness, size=len(requests))
    ends = np.cumsum(gaps)
    times: list[float] = (ends * (len(requests) / load.rate / ends[-1])).tolist()
    return times


class Driver:
    """Sends the requests of one run and keeps their timelines, even if the run is cut short."""

    def __init__(
        self,
        endpoint: Endpoint,
        max_concurrency: int | None = None,
        on_finished: Callable[[Timeline], None] = lambda timeline: None,
    ) -> None:
        self.timelines: list[Timeline] = []
        self._endpoint = endpoint
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._on_finished = on_finished
        self._began_s = perf_counter()
        self._ended_s: float | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began; constant once it has ended."""
        return (self._ended_s or perf_counter()) - self._began_s

    async def run(self, requests: Sequence[WorkloadRequest], times: Sequence[float]) -> None:
        """Send each request when it is due and concurrency allows, and wait for all responses.

        Raises:
            ServerLost: the server stopped answering; requests in flight were canceled.
        """
        with _short_collections():
            self._began_s = perf_counter()
            try:
                async with asyncio.TaskGroup() as group:
                    for request, due_s in zip(requests, times, strict=True):
                        await self._wait_until(due_s)
                        if self._slots is not None:
                            await self._slots.acquire()
                        group.create_task(self._converse(request))
            except* PagedError as errors:
                raise errors.exceptions[0] from None
            finally:
                self._ended_s = perf_counter()

    async def _wait_until(self, due_s: float) -> None:
        delay_s = self._began_s + due_s - perf_counter()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    async def _converse(self, request: WorkloadRequest) -> None:
        """Send a request and, for a conversation, its follow-up requests."""
        try:
            following: WorkloadRequest | None = request
            while following is not None:
                timeline = await self._endpoint.send(following)
                self.timelines.append(timeline)
                self._on_finished(timeline)
                if not timeline.is_success:
                    await self._check_server(timeline)
                    break
                following = following.follow_up(timeline.text)
        finally:
            if self._slots is not None:
                self._slots.release()

    async def _check_server(self, timeline: Timeline) -> None:
        if not await self._endpoint.is_ready():
            raise ServerLost(
                f"the server was lost after {sum(t.is_success for t in self.timelines)} complete "
                f"requests ({timeline.error}); look into its log and start it again"
            )


@contextlib.contextmanager
def _short_collections() -> Iterator[None]:
    """Freeze existing objects, so that garbage collection does not scan the workload mid-run.

    Where objects were frozen before, those of this run stay frozen with them.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()

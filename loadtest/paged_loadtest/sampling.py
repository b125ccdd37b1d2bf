"""Samples the server's own load metrics periodically during a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from time import perf_counter

from paged_backend.tools.scrape import Scrape, scrape
from paged_backend.values.errors import ConfigError
from paged_loadtest.results import ServerSample

_INTERVAL_S = 0.25
_SHOWN = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")


class ServerSampler:
    """Samples one metrics page."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model

    def check(self) -> None:
        """Check that the page shows the model's metrics.

        Raises:
            ConfigError: it does not, or the address does not answer.
        """
        try:
            server_sample(self._scrape(), 0.0)
        except ConfigError as error:
            raise ConfigError(f"--metrics-url: {error}") from error

    @contextlib.asynccontextmanager
    async def during(self) -> AsyncIterator[list[ServerSample]]:
        """Yield a list to which samples are appended until the block exits."""
        samples: list[ServerSample] = []
        task = asyncio.create_task(self._keep_sampling(samples))
        try:
            yield samples
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _keep_sampling(self, samples: list[ServerSample]) -> None:
        began_s = perf_counter()
        while True:
            with contextlib.suppress(ConfigError):  # skip one; the next may succeed
                page = await asyncio.to_thread(self._scrape)
                samples.append(server_sample(page, perf_counter() - began_s))
            await asyncio.sleep(_INTERVAL_S)

    def _scrape(self) -> Scrape:
        return scrape(self._url, self._model, names=_SHOWN)


def server_sample(page: Scrape, at_s: float) -> ServerSample:
    """Return the load on the server, ``at_s`` seconds into a run.

    Raises:
        ConfigError: the server does not show one of these metrics.
    """
    return ServerSample(
        at_s=at_s,
        kv_usage=page.mean("kv_cache_usage_perc"),
        num_running=page.value("num_requests_running"),
        num_waiting=page.value("num_requests_waiting"),
    )

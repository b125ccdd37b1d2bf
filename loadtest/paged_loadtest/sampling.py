"""Samples the server's own load metrics periodically during a run."""

from __future__ import annotations

import contextlib

from paged_backend.tools.scrape import MetricsWatch, Scrape, scrape
from paged_backend.values.errors import ConfigError
from paged_loadtest.results import ServerSample

_INTERVAL_S = 0.25
SHOWN = ("kv_cache_usage_perc", "num_requests_running", "num_requests_waiting")


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
            server_sample(scrape(self._url, self._model, names=SHOWN), 0.0)
        except ConfigError as error:
            raise ConfigError(f"--metrics-url: {error}") from error

    def watch(self) -> MetricsWatch:
        """Return a context in which the page is read."""
        return MetricsWatch(self._url, SHOWN, self._model, interval_s=_INTERVAL_S)


def server_samples(watch: MetricsWatch) -> list[ServerSample]:
    """Return the load at each reading so far, without pages that lack a metric."""
    samples = []
    for at_s, page in list(watch.readings):
        with contextlib.suppress(ConfigError):
            samples.append(server_sample(page, at_s))
    return samples


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

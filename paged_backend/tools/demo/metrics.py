"""Samples a server's metrics in the background."""

from __future__ import annotations

import threading
from typing import Self

from paged_backend.tools.scrape import Scrape, scrape

INTERVAL_S = 0.01
SETTLE_S = 0.2  # the server publishes the last counts a moment after the last response


class MetricsWatch:
    """Samples some of a server's metrics from entering the context to leaving it."""

    def __init__(self, url: str, *names: str) -> None:
        self._url, self._names = url, names
        self._samples: list[Scrape] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.wait(SETTLE_S)
        self._done.set()
        self._thread.join()
        self._sample()

    def last(self, name: str) -> float:
        """The last sample of the metric."""
        return self._samples[-1].value(name)

    def peak(self, name: str) -> float:
        """The highest sample of the metric."""
        return max(sample.value(name) for sample in self._samples)

    def at_peak(self, name: str, other: str) -> float:
        """The value of metric `other` when metric `name` was highest."""
        return max(self._samples, key=lambda sample: sample.value(name)).value(other)

    def _sample(self) -> None:
        self._samples.append(scrape(self._url, names=self._names))

    def _run(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self._sample()

"""Samples a server's metrics in the background."""

from __future__ import annotations

import re
import threading
import urllib.request
from typing import Self

INTERVAL_S = 0.01
SETTLE_S = 0.2  # the server publishes the last counts a moment after the last response
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the server is local
_SAMPLE = re.compile(r"^paged_(\w+)\{[^}]*\} (\S+)$", re.MULTILINE)


def read_metrics(url: str) -> dict[str, float]:
    """The current value of each `paged_` metric, by name without prefix, summed over labels."""
    with _OPENER.open(url, timeout=5) as response:
        text = response.read().decode()
    values: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        values[name] = values.get(name, 0.0) + float(value)
    return values


class MetricsWatch:
    """Samples a server's metrics from entering the context to leaving it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._samples: list[dict[str, float]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._samples.append(read_metrics(self._url))
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.wait(SETTLE_S)
        self._done.set()
        self._thread.join()
        self._samples.append(read_metrics(self._url))

    def last(self, name: str) -> float:
        """The last sample of the metric."""
        return self._samples[-1][name]

    def peak(self, name: str) -> float:
        """The highest sample of the metric."""
        return max(sample[name] for sample in self._samples)

    def at_peak(self, name: str, other: str) -> float:
        """The value of metric `other` when metric `name` was highest."""
        return max(self._samples, key=lambda sample: sample[name])[other]

    def _run(self) -> None:
        while not self._done.wait(INTERVAL_S):
            self._samples.append(read_metrics(self._url))

"""Metrics at the server's own endpoint.

A call to the server for one value takes 20 microseconds and more, in which no response is sent, and
only one thread may make it. So the many values of histograms are noted here, and the latest of each
is passed on when there is time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.histogram import HistogramCounts


class Registry:
    """The families and series of one model; a family ends with its Python object, so it keeps them.

    Args:
        families: Triton's ``MetricFamily`` class (``triton_python_backend_utils``).
        labels: of each series, model and version among them.
    """

    def __init__(self, families: Any, labels: Mapping[str, str]) -> None:
        self._make_family = families
        self._labels = dict(labels)
        self._families: dict[str, Any] = {}
        self._due: dict[Series, float] = {}  # what is still to be passed on, the oldest first
        self._shared: list[Counter] = []

    def gauge(self, name: str, help: str, **labels: str) -> Gauge:
        """A value that goes up and down."""
        return Gauge(self._due, self._metric(self._make_family.GAUGE, name, help, labels))

    def counter(self, name: str, help: str, *, shared: bool, **labels: str) -> Counter:
        """A value that only grows; the same name with other labels is in the same family.

        ``shared`` counts are told by one instance after the other and go on from where they stand;
        others are of one instance, and add up.
        """
        counter = Counter(self._due, self._metric(self._make_family.COUNTER, name, help, labels))
        if shared:
            self._shared.append(counter)
        return counter

    def histogram(
        self, name: str, help: str, bounds: Sequence[float], *, shared: bool
    ) -> PublishedHistogram:
        """A distribution, as the counters that Prometheus' histograms are made of.

        The server's own histogram takes one call for each value that is observed.
        """
        series = [
            self.counter(f"{name}_bucket", f"{help}, by upper bound", shared=shared, le=le)
            for le in [*(f"{bound:g}" for bound in bounds), "+Inf"]
        ]
        total = self.counter(f"{name}_sum", f"{help}, sum", shared=shared)
        count = self.counter(f"{name}_count", f"{help}, number", shared=shared)
        return PublishedHistogram(series, total, count)

    def observed(self, name: str, help: str, bounds: list[float]) -> Any:
        """The server's own histogram."""
        return self._metric(self._make_family.HISTOGRAM, name, help, {}, buckets=bounds)

    def catch_up(self) -> None:
        """Read where the shared counters stand by now."""
        for counter in self._shared:
            counter.catch_up()

    @property
    def num_due(self) -> int:
        """How many values are still to be passed on."""
        return len(self._due)

    def publish(self, limit: int) -> None:
        """Pass on so many values."""
        for series in list(self._due)[:limit]:
            series.publish(self._due.pop(series))

    def _metric(
        self, kind: Any, name: str, help: str, labels: Mapping[str, str], **more: Any
    ) -> Any:
        if name not in self._families:
            self._families[name] = self._make_family(name=name, description=help, kind=kind)
        return self._families[name].Metric(labels={**self._labels, **labels}, **more)


class Series(ABC):
    """One value at the server; equal only to itself."""

    def __init__(self, due: dict[Series, float], metric: Any, shown: float | None) -> None:
        self._due = due
        self._metric = metric
        self._noted = shown

    def show(self, value: float) -> None:
        """Pass a value on now, if it is another one."""
        if value != self._noted:
            self._noted = value
            self.publish(value)

    def note(self, value: float) -> None:
        """Have a value passed on when there is time."""
        if value != self._noted:
            self._noted = value
            self._due[self] = value

    @abstractmethod
    def publish(self, value: float) -> None:
        """Pass a value on now."""


class Gauge(Series):
    """Goes up and down."""

    def __init__(self, due: dict[Series, float], metric: Any) -> None:
        super().__init__(due, metric, None)

    def publish(self, value: float) -> None:
        """Pass a value on now."""
        self._metric.set(value)


class Counter(Series):
    """Only grows; a value below what it shows waits until it is passed."""

    def __init__(self, due: dict[Series, float], metric: Any) -> None:
        super().__init__(due, metric, 0.0)
        self._shown = 0.0

    def catch_up(self) -> None:
        """Read what the server shows, which others may have raised."""
        self._shown = self._noted = self._metric.value()

    def publish(self, value: float) -> None:
        """Pass a value on now."""
        if value > self._shown:
            self._metric.increment(value - self._shown)
            self._shown = value


class PublishedHistogram:
    """The counters of one distribution."""

    def __init__(self, buckets: list[Counter], total: Counter, count: Counter) -> None:
        self._buckets = buckets
        self._total = total
        self._count = count

    def note(self, counts: HistogramCounts) -> None:
        """Have the counts passed on when there is time."""
        for series, value in zip(self._buckets, counts.cumulative, strict=True):
            series.note(value)
        self._total.note(counts.total)
        self._count.note(counts.cumulative[-1])

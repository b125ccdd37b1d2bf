"""Metrics at Triton's metrics endpoint.

Only the sending thread may report values to the server. One value takes at least 20 microseconds,
in which that thread sends no response. So the values of histograms are stored here, and the latest
value of each series is reported when there is time.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_backend.values.histogram import HistogramCounts


class Registry:
    """The metric families and series of one model.

    It holds references to the Python objects of the families, so that they are not deleted.

    Args:
        families: Triton's ``MetricFamily`` class (``triton_python_backend_utils``).
        labels: labels of each series, including model and version.
    """

    def __init__(self, families: Any, labels: Mapping[str, str]) -> None:
        self._make_family = families
        self._labels = dict(labels)
        self._families: dict[str, Any] = {}
        self._due: dict[MetricSeries, float] = {}  # series to report, the oldest first
        self._shared: list[MetricSeries] = []

    def with_labels(self, **labels: str) -> Registry:
        """Return a registry with these families, more labels, and separate shared series."""
        other = Registry(self._make_family, {**self._labels, **labels})
        other._families, other._due = self._families, self._due
        return other

    def gauge(self, name: str, help: str, **labels: str) -> Gauge:
        """Return a gauge that all instances share; one instance at a time reports it."""
        gauge = Gauge(self._due, self._metric(self._make_family.GAUGE, name, help, labels))
        self._shared.append(gauge)
        return gauge

    def counter(self, name: str, help: str, *, shared: bool, **labels: str) -> Counter:
        """Return a counter; counters with the same name and different labels form one family.

        One instance at a time reports a ``shared`` counter, and the next one continues from the
        reported value. A counter that is not shared has a value in each instance, and the server
        shows their sum.
        """
        counter = Counter(self._due, self._metric(self._make_family.COUNTER, name, help, labels))
        if shared:
            self._shared.append(counter)
        return counter

    def info(self, name: str, help: str) -> Info:
        """Return a gauge of value 1 with facts as its labels."""
        return Info(lambda labels: self.gauge(name, help, **labels))

    def moment(self, name: str, help: str) -> Moment:
        """Return a gauge with facts as labels and the time as its value."""

        def make_family() -> Any:
            return self._make_family(name=name, description=help, kind=self._make_family.GAUGE)

        return Moment(make_family, self._labels)

    def counters_by_position(self, name: str, help: str) -> CountersByPosition:
        """Return shared counters with a label ``position``, which exist once they are not 0."""
        return CountersByPosition(
            lambda position: self.counter(name, help, shared=True, position=position)
        )

    def histogram(
        self, name: str, help: str, bounds: Sequence[float], *, shared: bool
    ) -> PublishedHistogram:
        """Return a histogram that is made of counters: one for each bucket, the sum and the count.

        A histogram of the server's own type is slower, as it needs a call for each observed value.
        """
        series = [
            self.counter(f"{name}_bucket", f"{help}, by upper bound", shared=shared, le=le)
            for le in [*(f"{bound:g}" for bound in bounds), "+Inf"]
        ]
        total = self.counter(f"{name}_sum", f"{help}, sum", shared=shared)
        count = self.counter(f"{name}_count", f"{help}, number", shared=shared)
        return PublishedHistogram(series, total, count)

    def observed(self, name: str, help: str, bounds: list[float]) -> Any:
        """Return a histogram of the server's own type."""
        return self._metric(self._make_family.HISTOGRAM, name, help, {}, buckets=bounds)

    def catch_up(self) -> None:
        """Read the present values of the shared series, which other instances have reported."""
        for series in self._shared:
            series.catch_up()

    @property
    def num_due(self) -> int:
        """Number of values to report."""
        return len(self._due)

    def publish(self, limit: int) -> None:
        """Report up to ``limit`` values."""
        for series in list(self._due)[:limit]:
            series.publish(self._due.pop(series))

    def _metric(
        self, kind: Any, name: str, help: str, labels: Mapping[str, str], **more: Any
    ) -> Any:
        if name not in self._families:
            self._families[name] = self._make_family(name=name, description=help, kind=kind)
        return self._families[name].Metric(labels={**self._labels, **labels}, **more)


class MetricSeries(ABC):
    """One value at the server; compared by identity."""

    def __init__(self, due: dict[MetricSeries, float], metric: Any, shown: float | None) -> None:
        self._due = due
        self._metric = metric
        self._noted = shown

    def show(self, value: float) -> None:
        """Report a value now, if it has changed."""
        if value != self._noted:
            self._noted = value
            self.publish(value)

    def note(self, value: float) -> None:
        """Report a value when there is time."""
        if value != self._noted:
            self._noted = value
            self._due[self] = value

    def catch_up(self) -> None:
        """Read the server's value, so that ``show`` and ``note`` compare with it."""
        self._noted = self._metric.value()

    @abstractmethod
    def publish(self, value: float) -> None:
        """Report the value now."""


class Gauge(MetricSeries):
    """A value that may rise and fall."""

    def __init__(self, due: dict[MetricSeries, float], metric: Any) -> None:
        super().__init__(due, metric, None)

    def publish(self, value: float) -> None:
        """Report the value now."""
        self._metric.set(value)


class Info:
    """A gauge of value 1 with facts as its labels. Series with earlier facts have the value 0.

    Args:
        make_gauge: makes the series with these labels.
    """

    def __init__(self, make_gauge: Callable[[dict[str, str]], Gauge]) -> None:
        self._make_gauge = make_gauge
        self._facts: dict[str, str] = {}
        self._gauge: Gauge | None = None

    def show(self, **facts: object) -> None:
        """Report facts now, if they have changed."""
        labels = {name: str(value) for name, value in facts.items()}
        if labels == self._facts:
            return
        if self._gauge is not None:
            self._gauge.show(0)
        self._facts, self._gauge = labels, self._make_gauge(labels)
        self._gauge.show(1)


class Moment:
    """Facts as labels of a gauge with the time at which they were last true.

    The series with the facts before them is deleted, because any number of facts may follow. The
    server deletes a series only with the object of its family. So each series has its object.

    Args:
        make_family: makes an object of the family.
        labels: labels of each series besides the facts.
    """

    def __init__(self, make_family: Callable[[], Any], labels: Mapping[str, str]) -> None:
        self._make_family = make_family
        self._labels = labels
        self._facts: dict[str, str] = {}
        self._series: tuple[Any, Any] | None = None  # family and metric

    def show(self, **facts: str) -> None:
        """Report facts now, if they have changed."""
        if facts == self._facts:
            return
        self._facts, self._series = facts, None  # deletes the one before
        family = self._make_family()
        metric = family.Metric(labels={**self._labels, **facts})
        metric.set(time.time())
        self._series = family, metric


class Counter(MetricSeries):
    """A value that only grows; a lower value is ignored until it exceeds the reported one."""

    def __init__(self, due: dict[MetricSeries, float], metric: Any) -> None:
        super().__init__(due, metric, 0.0)
        self._shown = 0.0

    def catch_up(self) -> None:
        """Read the server's value, so that ``publish`` adds only what exceeds it."""
        super().catch_up()
        self._shown = self._metric.value()

    def publish(self, value: float) -> None:
        """Report the value now."""
        if value > self._shown:
            self._metric.increment(value - self._shown)
            self._shown = value


class CountersByPosition:
    """Counters for the positions 0, 1 and so on.

    Args:
        make: makes the counter of a position.
    """

    def __init__(self, make: Callable[[str], Counter]) -> None:
        self._make = make
        self._counters: list[Counter] = []

    def show(self, values: Sequence[int]) -> None:
        """Report the value of each position up to the last one that has any."""
        for position in range(len(self._counters), len(values)):
            counter = self._make(str(position))
            counter.catch_up()  # another instance may have reported it
            self._counters.append(counter)
        for counter, value in zip(self._counters, values, strict=False):
            counter.show(value)


class PublishedHistogram:
    """A histogram that is made of counters."""

    def __init__(self, buckets: list[Counter], total: Counter, count: Counter) -> None:
        self._buckets = buckets
        self._total = total
        self._count = count

    def note(self, counts: HistogramCounts) -> None:
        """Report the counts when there is time."""
        for series, value in zip(self._buckets, counts.cumulative, strict=True):
            series.note(value)
        self._total.note(counts.total)
        self._count.note(counts.cumulative[-1])

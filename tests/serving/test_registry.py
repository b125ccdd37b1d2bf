"""Metrics that the instances of a model report in turn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from paged_backend.serving.metrics.registry import Registry


class Metric:
    """One series of the server; Triton's own class exists only inside of the server."""

    def __init__(self) -> None:
        self._value = 0.0

    def set(self, value: float) -> None:
        self._value = value

    def increment(self, value: float) -> None:
        self._value += value

    def value(self) -> float:
        return self._value


class MetricFamily:
    """The server's families: the same name and labels are the same series for all instances."""

    COUNTER, GAUGE = "counter", "gauge"
    series: ClassVar[dict[tuple[str, tuple[tuple[str, str], ...]], Metric]] = {}

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name = name

    def Metric(self, labels: Mapping[str, str]) -> Metric:  # noqa: N802 (Triton's name)
        return self.series.setdefault((self._name, tuple(sorted(labels.items()))), Metric())


def test_an_instance_that_reports_again_replaces_what_another_reported() -> None:
    """The first instance showed 0, the second 5, and then the engine died with it."""
    first, second = (Registry(MetricFamily, {"model": "m"}) for _ in range(2))
    mine, theirs = (registry.gauge("blocks_used", "Blocks") for registry in (first, second))
    mine.show(0)
    second.catch_up()
    theirs.show(5)
    first.catch_up()
    mine.show(0)
    assert mine._metric.value() == 0


def test_shared_counters_continue_from_the_reported_value() -> None:
    first, second = (Registry(MetricFamily, {"model": "m"}) for _ in range(2))
    mine, theirs = (registry.counter("steps", "Steps", shared=True) for registry in (first, second))
    mine.show(3)
    second.catch_up()
    theirs.show(10)
    first.catch_up()
    mine.show(8)  # an engine that counts from 0 again
    assert mine._metric.value() == 10
    mine.show(12)
    assert mine._metric.value() == 12


def test_facts_are_labels_and_earlier_facts_have_the_value_0() -> None:
    info = Registry(MetricFamily, {"model": "m"}).info("cache_config", "The cache")
    for num_blocks in (7, 7, 9, 9):
        info.show(num_blocks=num_blocks)
    shown = {
        dict(labels)["num_blocks"]: metric.value()
        for (name, labels), metric in MetricFamily.series.items()
        if name == "cache_config"
    }
    assert shown == {"7": 0, "9": 1}

"""The engine's counts at Triton's own metrics endpoint, named as vLLM names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paged_backend.outputs import EngineStats, FinishReason
from paged_backend.serving.observer import Observer

Read = Callable[[EngineStats], float]
Table = Mapping[str, tuple[str, Read]]
"""Name of a metric -> its description and its value."""

VLLM_GAUGES: Table = {
    "num_requests_running": ("Sequences that run", lambda s: s.num_running),
    "num_requests_waiting": ("Requests that wait", lambda s: s.num_waiting),
    "kv_cache_usage_perc": (
        "Part of the KV blocks in use, from 0 to 1",
        lambda s: s.num_used_blocks / s.num_blocks,
    ),
}

GAUGES: Table = {
    **VLLM_GAUGES,
    "kv_cache_utilization_perc": (
        "Part of the slots of used KV blocks that hold a token, from 0 to 1",
        lambda s: s.utilization,
    ),
    "kv_blocks_total": ("KV blocks of the pool", lambda s: s.num_blocks),
    "kv_blocks_used": ("KV blocks in use", lambda s: s.num_used_blocks),
    "kv_blocks_cached": ("Free KV blocks with findable content", lambda s: s.num_cached_blocks),
    "kv_blocks_free": ("KV blocks not in use", lambda s: s.num_blocks - s.num_used_blocks),
}

VLLM_COUNTERS: Table = {
    "num_preemptions_total": ("Sequences preempted", lambda s: s.num_preemptions),
    "prompt_tokens_total": ("Prompt tokens", lambda s: s.num_prompt_tokens),
    "generation_tokens_total": ("Generated tokens", lambda s: s.num_generation_tokens),
    "prefix_cache_queries_total": ("Prompt tokens looked up", lambda s: s.num_prompt_tokens),
    "prefix_cache_hits_total": ("Prompt tokens found cached", lambda s: s.num_cache_hits),
}

COUNTERS: Table = {
    **VLLM_COUNTERS,
    "engine_steps_total": ("Steps of the engine", lambda s: s.num_steps),
}

PREFIX = "paged_"


class Registry:
    """Makes metric families of one prefix; a family ends with its Python object, so it keeps them.

    Args:
        families: Triton's ``MetricFamily`` class (``triton_python_backend_utils``).
        labels: model and version.
    """

    def __init__(self, families: Any, labels: Mapping[str, str], prefix: str) -> None:
        self._make_family = families
        self._labels = dict(labels)
        self._prefix = prefix
        self._families: dict[str, Any] = {}

    def gauge(self, name: str, help: str) -> Any:
        """A value that goes up and down."""
        return self._metric(self._make_family.GAUGE, name, help)

    def counter(self, name: str, help: str, **labels: str) -> Any:
        """A value that only grows; the same name with other labels is in the same family."""
        return self._metric(self._make_family.COUNTER, name, help, labels)

    def histogram(self, name: str, help: str, buckets: list[float]) -> Any:
        """A distribution, by upper bounds of its buckets."""
        return self._metric(self._make_family.HISTOGRAM, name, help, buckets=buckets)

    def _metric(
        self, kind: Any, name: str, help: str, labels: Mapping[str, str] | None = None, **more: Any
    ) -> Any:
        if name not in self._families:
            self._families[name] = self._make_family(
                name=self._prefix + name, description=help, kind=kind
            )
        return self._families[name].Metric(labels={**self._labels, **(labels or {})}, **more)


class StatsMetrics:
    """Tables of gauges and counters; used by one thread, since the server's API needs that."""

    def __init__(self, registry: Registry, gauges: Table, counters: Table) -> None:
        self._gauges = [(registry.gauge(name, help), read) for name, (help, read) in gauges.items()]
        self._counters = [
            (registry.counter(name, help), read) for name, (help, read) in counters.items()
        ]
        name, help = "request_success_total", "Sequences ended, by reason"
        for reason in FinishReason:
            metric = registry.counter(name, help, finished_reason=reason)
            self._counters.append((metric, _finished(reason)))
        self._shown: list[float | None] = [None] * len(self._gauges)
        self._counted: list[float] | None = None  # what each counter shows

    def report(self, stats: EngineStats) -> None:
        """Publish counts; counters are shared by all instances and go on from where they stand."""
        for index, (metric, read) in enumerate(self._gauges):
            value = read(stats)
            if value != self._shown[index]:
                metric.set(value)
                self._shown[index] = value
        if self._counted is None:
            self._counted = [metric.value() for metric, _ in self._counters]
        for index, (metric, read) in enumerate(self._counters):
            new = read(stats) - self._counted[index]
            if new > 0:
                metric.increment(new)
                self._counted[index] += new


class Metrics(Observer):
    """The engine's counts under this project's prefix."""

    def __init__(self, families: Any, labels: Mapping[str, str]) -> None:
        self._registry = Registry(families, labels, PREFIX)
        self._stats = StatsMetrics(self._registry, GAUGES, COUNTERS)
        self._up = self._registry.gauge("engine_up", "1 while the engine runs")
        self._up.set(1)

    def report(self, stats: EngineStats) -> None:
        """Publish the counts."""
        self._stats.report(stats)

    def report_dead(self) -> None:
        """Say that the engine has ended."""
        self._up.set(0)


def _finished(reason: FinishReason) -> Read:
    return lambda stats: stats.finished.get(reason, 0)

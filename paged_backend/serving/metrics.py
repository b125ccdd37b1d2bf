"""The engine's counts at Triton's own metrics endpoint, named as vLLM names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_backend.outputs import EngineStats, FinishReason

Read = Callable[[EngineStats], float]

GAUGES: dict[str, tuple[str, Read]] = {
    "num_requests_running": ("Sequences that run", lambda s: s.num_running),
    "num_requests_waiting": ("Requests that wait", lambda s: s.num_waiting),
    "kv_cache_usage_perc": (
        "Part of the KV blocks in use, from 0 to 1",
        lambda s: s.num_used_blocks / s.num_blocks,
    ),
    "kv_cache_utilization_perc": (
        "Part of the slots of used KV blocks that hold a token, from 0 to 1",
        lambda s: s.utilization,
    ),
    "kv_blocks_total": ("KV blocks of the pool", lambda s: s.num_blocks),
    "kv_blocks_used": ("KV blocks in use", lambda s: s.num_used_blocks),
    "kv_blocks_cached": ("Free KV blocks with findable content", lambda s: s.num_cached_blocks),
    "kv_blocks_free": ("KV blocks not in use", lambda s: s.num_blocks - s.num_used_blocks),
}

COUNTERS: dict[str, tuple[str, Read]] = {
    "num_preemptions_total": ("Sequences preempted", lambda s: s.num_preemptions),
    "prompt_tokens_total": ("Prompt tokens", lambda s: s.num_prompt_tokens),
    "generation_tokens_total": ("Generated tokens", lambda s: s.num_generation_tokens),
    "prefix_cache_queries_total": ("Prompt tokens looked up", lambda s: s.num_prompt_tokens),
    "prefix_cache_hits_total": ("Prompt tokens found cached", lambda s: s.num_cache_hits),
    "engine_steps_total": ("Steps of the engine", lambda s: s.num_steps),
}

PREFIX = "paged_"


class Metrics:
    """All metric families of one model; used by one thread, since the server's API needs that.

    Args:
        families: Triton's ``MetricFamily`` class (``triton_python_backend_utils``).
        labels: model and version.
    """

    def __init__(self, families: Any, labels: dict[str, str]) -> None:
        self._make_family = families
        self._families: list[Any] = []  # a family ends with its Python object
        gauge, counter = families.GAUGE, families.COUNTER
        self._gauges = [
            (self._family(gauge, name, help).Metric(labels=labels), read)
            for name, (help, read) in GAUGES.items()
        ]
        self._counters = [
            (self._family(counter, name, help).Metric(labels=labels), read)
            for name, (help, read) in COUNTERS.items()
        ]
        finished = self._family(counter, "request_success_total", "Sequences ended, by reason")
        for reason in FinishReason:
            metric = finished.Metric(labels={**labels, "finished_reason": reason})
            self._counters.append((metric, _finished(reason)))
        self._counted: list[float] | None = None  # what each counter shows
        self._up = self._family(gauge, "engine_up", "1 while the engine runs").Metric(labels=labels)
        self._up.set(1)

    def report(self, stats: EngineStats) -> None:
        """Publish counts; counters are shared by all instances and go on from where they stand."""
        for metric, read in self._gauges:
            metric.set(read(stats))
        if self._counted is None:
            self._counted = [metric.value() for metric, _ in self._counters]
        for index, (metric, read) in enumerate(self._counters):
            new = read(stats) - self._counted[index]
            if new > 0:
                metric.increment(new)
                self._counted[index] += new

    def report_dead(self) -> None:
        """Say that the engine has ended."""
        self._up.set(0)

    def _family(self, kind: Any, name: str, help: str) -> Any:
        family = self._make_family(name=PREFIX + name, description=help, kind=kind)
        self._families.append(family)
        return family


def _finished(reason: FinishReason) -> Read:
    return lambda stats: stats.finished.get(reason, 0)

"""Reports the counts of an engine at Triton's metrics endpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from paged_backend.serving.metrics.registry import (
    CountersByPosition,
    Info,
    MetricSeries,
    Moment,
    Registry,
)
from paged_backend.values.outputs import ENGINE_HISTOGRAMS, EngineStats, FinishReason
from paged_backend.values.request import RequestLimits

VLLM_PREFIX = "vllm:"

Read = Callable[[EngineStats], float]
Table = Mapping[str, tuple[str, Read]]
"""Name of a metric -> its description and its value."""

VLLM_GAUGES: Table = {
    "num_requests_running": ("Sequences that run", lambda s: s.num_running),
    "num_requests_waiting": ("Requests that wait", lambda s: s.num_waiting),
    "kv_cache_usage_perc": (
        "Part of the KV blocks in use, from 0 to 1",
        lambda s: s.kv_usage,
    ),
}

GAUGES: Table = {
    **VLLM_GAUGES,
    "kv_cache_utilization_perc": (
        "Part of the slots of used KV blocks that hold a token, from 0 to 1",
        lambda s: s.utilization,
    ),
    "prefix_cache_hit_rate": (
        "Part of all prompt tokens that was found cached, from 0 to 1",
        lambda s: s.num_cache_hits / max(1, s.num_prompt_tokens),
    ),
    "kv_blocks_total": ("KV blocks of the pool", lambda s: s.num_blocks),
    "kv_bytes_per_token": (
        "Bytes of the keys and values of a token in all layers",
        lambda s: s.kv_bytes_per_token,
    ),
    "kv_blocks_used": ("KV blocks in use", lambda s: s.num_used_blocks),
    "kv_blocks_cached": ("Free KV blocks with findable content", lambda s: s.num_cached_blocks),
    "kv_blocks_free": ("KV blocks not in use", lambda s: s.num_blocks - s.num_used_blocks),
    "state_slots_total": ("Slots for states of sequences", lambda s: s.num_state_slots),
    "state_slots_used": (
        "Slots with the states of running sequences",
        lambda s: s.num_used_state_slots,
    ),
}

VLLM_COUNTERS: Table = {
    "num_preemptions_total": ("Sequences preempted", lambda s: s.num_preemptions),
    "prompt_tokens_total": ("Prompt tokens", lambda s: s.num_prompt_tokens),
    "generation_tokens_total": ("Generated tokens", lambda s: s.num_generation_tokens),
    "prefix_cache_queries_total": ("Prompt tokens looked up", lambda s: s.num_prompt_tokens),
    "prefix_cache_hits_total": ("Prompt tokens found cached", lambda s: s.num_cache_hits),
    "spec_decode_num_drafts_total": ("Guesses that steps have verified", lambda s: s.num_drafts),
    "spec_decode_num_draft_tokens_total": (
        "Tokens of guesses that steps have verified",
        lambda s: s.num_draft_tokens,
    ),
    "spec_decode_num_accepted_tokens_total": (
        "Tokens of guesses that were right",
        lambda s: s.num_accepted_tokens,
    ),
}

COUNTERS: Table = {
    **VLLM_COUNTERS,
    "engine_steps_total": ("Steps of the engine", lambda s: s.num_steps),
    "forced_tokens_total": (
        "Generated tokens that a grammar forced, without sampling",
        lambda s: s.num_forced_tokens,
    ),
}

# TensorRT-LLM's gauges: the server's ORCA header and the Gateway API Inference Extension read them.
_TRTLLM_REQUESTS: dict[str, Read] = {
    "active": lambda s: s.num_running + s.num_waiting,
    "scheduled": lambda s: s.num_running,
    "waiting": lambda s: s.num_waiting,
}
_TRTLLM_BLOCKS: dict[str, Read] = {
    "max": lambda s: s.num_blocks,
    "free": lambda s: s.num_blocks - s.num_used_blocks,
    "used": lambda s: s.num_used_blocks,
    "tokens_per": lambda s: s.block_size,
    "fraction": lambda s: s.kv_usage,
}


def _stats_series(
    registry: Registry, prefix: str, gauges: Table, counters: Table
) -> list[tuple[MetricSeries, Read]]:
    """Create gauges and counters, each with the function that reads its value."""
    series: list[tuple[MetricSeries, Read]] = [
        (registry.gauge(prefix + name, help), read) for name, (help, read) in gauges.items()
    ]
    series += [
        (registry.counter(prefix + name, help, shared=True), read)
        for name, (help, read) in counters.items()
    ]
    name, help = f"{prefix}request_success_total", "Sequences ended, by reason"
    series += [
        (registry.counter(name, help, shared=True, finished_reason=reason), _finished(reason))
        for reason in FinishReason
    ]
    return series


def _cache_config_info(registry: Registry, prefix: str) -> Info:
    """Return vLLM's gauge with the size of the block pool, for the endpoint pickers of gateways."""
    return registry.info(f"{prefix}cache_config_info", "The KV cache: block size, number of blocks")


def _lora_info(registry: Registry, prefix: str) -> Moment:
    """Return vLLM's gauge with the adapters in use, for the endpoint pickers of gateways."""
    return registry.moment(f"{prefix}lora_requests_info", "The LoRA adapters in use, by time")


def _accepted_at(registry: Registry, prefix: str) -> CountersByPosition:
    """Return vLLM's counters of right tokens of guesses, by their places in a guess."""
    name = f"{prefix}spec_decode_num_accepted_tokens_per_pos_total"
    return registry.counters_by_position(name, "Right tokens of guesses, by position in the guess")


def _trtllm_series(registry: Registry, limits: RequestLimits) -> list[tuple[MetricSeries, Read]]:
    requests = {**_TRTLLM_REQUESTS, "max": lambda _: limits.max_num_seqs}
    name, help = "nv_trt_llm_request_metrics", "Requests, by state"
    series: list[tuple[MetricSeries, Read]] = [
        (registry.gauge(name, help, request_type=label), read) for label, read in requests.items()
    ]
    name, help = "nv_trt_llm_kv_cache_block_metrics", "KV blocks, by state"
    series += [
        (registry.gauge(name, help, kv_cache_block_type=label), read)
        for label, read in _TRTLLM_BLOCKS.items()
    ]
    return series


class EngineMetrics:
    """The series of one engine.

    Args:
        registry: makes them, with the labels of the engine.
        prefix: prefix of the families' names.
        limits: limits of the loaded model.
    """

    def __init__(self, registry: Registry, prefix: str, limits: RequestLimits) -> None:
        self._registry = registry
        self._series = [
            *_stats_series(registry, prefix, GAUGES, COUNTERS),
            *_trtllm_series(registry, limits),
        ]
        self._cache_configs = [_cache_config_info(registry, prefix)]
        self._accepted_at = [_accepted_at(registry, prefix)]
        self._max_loras = limits.max_loras
        self._lora_infos = [_lora_info(registry, prefix)] if limits.has_adapters else []
        self._up = registry.gauge(f"{prefix}engine_up", "1 while the engine runs")
        self._up.show(1)
        self._restarts = registry.counter(
            f"{prefix}engine_restarts_total", "Engines started after the end of one", shared=False
        )
        self._num_restarts = 0
        self._histograms = {
            name: registry.histogram(prefix + name, help, bounds, shared=True)
            for name, (help, bounds) in ENGINE_HISTOGRAMS.items()
        }
        self._stats: EngineStats | None = None  # the latest, if its histograms are not noted yet

    def add_vllm_series(self) -> None:
        """Report the counts under the names of vllm_backend as well."""
        self._series += _stats_series(self._registry, VLLM_PREFIX, VLLM_GAUGES, VLLM_COUNTERS)
        self._cache_configs.append(_cache_config_info(self._registry, VLLM_PREFIX))
        self._accepted_at.append(_accepted_at(self._registry, VLLM_PREFIX))
        if self._lora_infos:
            self._lora_infos.append(_lora_info(self._registry, VLLM_PREFIX))

    def report(self, stats: EngineStats, *, anew: bool) -> None:
        """Report the counts; histograms are reported after ``note_histograms``."""
        if anew:
            self._registry.catch_up()
        for series, read in self._series:
            series.show(read(stats))
        for accepted in self._accepted_at:
            accepted.show(stats.num_accepted_at)
        for info in self._cache_configs:
            info.show(block_size=stats.block_size, num_gpu_blocks=stats.num_blocks)
        for moment in self._lora_infos:
            moment.show(
                max_lora=str(self._max_loras),
                running_lora_adapters=",".join(stats.running_adapters),
                waiting_lora_adapters=",".join(stats.waiting_adapters),
            )
        self._stats = stats

    def report_lost(self) -> None:
        """Report that the engine has ended."""
        self._up.show(0)

    def report_back(self, *, restarted: bool) -> None:
        """Report that a new engine is ready."""
        self._up.show(1)
        self._num_restarts += restarted
        self._restarts.show(self._num_restarts)

    def note_histograms(self) -> None:
        """Let the registry report the latest histograms when there is time."""
        if self._stats is not None:
            for name, counts in self._stats.histograms.items():
                self._histograms[name].note(counts)
            self._stats = None


def _finished(reason: FinishReason) -> Read:
    return lambda stats: stats.finished.get(reason, 0)

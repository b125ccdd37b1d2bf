"""Reports a model's metrics at Triton's metrics endpoint, under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paged_backend.serving.metrics.registry import CountersByPosition, Info, MetricSeries, Registry
from paged_backend.serving.metrics.stat_logger import AnswerClock, RequestClock, StatLogger
from paged_backend.values.histogram import RunningHistogram
from paged_backend.values.outputs import (
    ENGINE_HISTOGRAMS,
    EngineStats,
    FinishReason,
    SequenceOutput,
)
from paged_backend.values.request import Request, RequestLimits

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

_FIRST_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0),
)
_WHOLE_REQUEST_S = (
    *(0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0),
)
_LENGTHS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_NUM_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)

REFUSALS = ("queue_full", "rate_limited", "process_lost", "draining")
VLLM_PREFIX = "vllm:"

_FIRST_TOKEN = "time_to_first_token_seconds"
_GAP = "inter_token_latency_seconds"
_PER_TOKEN = "request_time_per_output_token_seconds"
_WHOLE_REQUEST = "e2e_request_latency_seconds"
_PROMPT_TOKENS = "request_prompt_tokens"
_GENERATION_TOKENS = "request_generation_tokens"
_LONGEST = "request_max_num_generation_tokens"
_N = "request_params_n"
_MAX_TOKENS = "request_params_max_tokens"

REQUEST_HISTOGRAMS = {
    _FIRST_TOKEN: ("From a request's arrival to its first token", _FIRST_TOKEN_S),
    _GAP: ("From a token to the next of its answer", _GAP_S),
    _PER_TOKEN: ("Mean time for each token of an answer after its first", _GAP_S),
    _WHOLE_REQUEST: ("From a request's arrival to its last token", _WHOLE_REQUEST_S),
    _PROMPT_TOKENS: ("Prompt tokens of a request", _LENGTHS),
    _GENERATION_TOKENS: ("Tokens of all answers to a request", _LENGTHS),
    _LONGEST: ("Tokens of the longest answer to a request", _LENGTHS),
    _N: ("Answers asked for by a request", _NUM_ANSWERS),
    _MAX_TOKENS: ("Tokens allowed for each answer to a request, where it says", _LENGTHS),
}

# 8 values take about 0.2 ms of the sending thread; there is such a moment every few milliseconds.
_PER_MOMENT = 8
_HISTOGRAM_INTERVAL_S = 2.0  # as often as tritonserver updates its own metrics


def stats_series(
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


def cache_config_info(registry: Registry, prefix: str) -> Info:
    """Return vLLM's gauge with the size of the block pool, for the endpoint pickers of gateways."""
    return registry.info(f"{prefix}cache_config_info", "The KV cache: block size, number of blocks")


def accepted_at(registry: Registry, prefix: str) -> CountersByPosition:
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


class MetricsPublisher(StatLogger):
    """Reports the engine's counts and the latencies of this instance's requests.

    Args:
        families: Triton's ``MetricFamily`` class.
        labels: model and version.
        prefix: prefix of the families' names.
        limits: limits of the loaded model.
    """

    def __init__(
        self, families: Any, labels: Mapping[str, str], prefix: str, limits: RequestLimits
    ) -> None:
        if prefix == VLLM_PREFIX:  # its dashboards know models by that label
            labels = {**labels, "model_name": labels["model"]}
        self._registry = registry = Registry(families, labels)
        self._series = [
            *stats_series(registry, prefix, GAUGES, COUNTERS),
            *_trtllm_series(registry, limits),
        ]
        self._accepted_at = [accepted_at(registry, prefix)]
        self._cache_configs = [cache_config_info(registry, prefix)]
        self._up = registry.gauge(f"{prefix}engine_up", "1 while the engine runs")
        self._up.show(1)
        self._restarts = registry.counter(
            f"{prefix}engine_restarts_total", "Engines started after the end of one", shared=False
        )
        self._num_restarts = 0
        name, help = f"{prefix}request_refused_total", "Requests refused, by reason"
        self._refused = {
            reason: registry.counter(name, help, shared=False, reason=reason) for reason in REFUSALS
        }
        self._request_histograms = {
            name: RunningHistogram(bounds) for name, (_, bounds) in REQUEST_HISTOGRAMS.items()
        }
        self._of_requests = {
            name: registry.histogram(prefix + name, help, bounds, shared=False)
            for name, (help, bounds) in REQUEST_HISTOGRAMS.items()
        }
        self._of_engine = {
            name: registry.histogram(prefix + name, help, bounds, shared=True)
            for name, (help, bounds) in ENGINE_HISTOGRAMS.items()
        }
        self._stats: EngineStats | None = None  # the latest, if its histograms are not noted yet
        self._histograms_due = 0.0

    def report(self, stats: EngineStats, *, anew: bool) -> None:
        """Report the counts; histograms are reported by ``publish``."""
        if anew:
            self._registry.catch_up()
        for series, read in self._series:
            series.show(read(stats))
        for accepted in self._accepted_at:
            accepted.show(stats.num_accepted_at)
        for info in self._cache_configs:
            info.show(block_size=stats.block_size, num_gpu_blocks=stats.num_blocks)
        self._stats = stats

    def report_refused(self, numbers: Mapping[str, int]) -> None:
        """Report the number of refused requests."""
        for reason, counter in self._refused.items():
            counter.show(numbers.get(reason, 0))

    def report_lost(self) -> None:
        """Report that the engine has ended."""
        self._up.show(0)

    def report_back(self, *, restarted: bool) -> None:
        """Report that a new engine is ready."""
        self._up.show(1)
        self._num_restarts += restarted
        self._restarts.show(self._num_restarts)

    def report_tokens(self, clock: RequestClock, outputs: Sequence[SequenceOutput]) -> None:
        """Record the latencies of new tokens.

        If several tokens of a completion arrive together, the time since the previous token is
        divided equally among them.
        """
        now = time.monotonic()
        numbers: dict[int, int] = {}
        for output in outputs:
            numbers[output.index] = numbers.get(output.index, 0) + len(output.new_token_ids)
        for index, number in numbers.items():
            if number:
                self._take(clock, index, number, now)

    def report_end(self, clock: RequestClock, request: Request) -> None:
        """Record the size and the duration of a request."""
        histograms, params = self._request_histograms, request.params
        histograms[_WHOLE_REQUEST].observe(time.monotonic() - clock.started)
        histograms[_PROMPT_TOKENS].observe(len(request.prompt_token_ids))
        if request.pooling is not None:
            return
        histograms[_GENERATION_TOKENS].observe(clock.num_tokens)
        histograms[_LONGEST].observe(max((a.num_tokens for a in clock.answers.values()), default=0))
        histograms[_N].observe(params.n)
        if params.max_tokens is not None:
            histograms[_MAX_TOKENS].observe(params.max_tokens)
        for answer in clock.answers.values():
            if answer.seconds_per_token is not None:
                histograms[_PER_TOKEN].observe(answer.seconds_per_token)

    def publish(self, *, idle: bool) -> None:
        """Report a few values, or all of them while no request is open."""
        now = time.monotonic()
        if idle or (now >= self._histograms_due and not self._registry.num_due):
            self._note_histograms()
            self._histograms_due = now + _HISTOGRAM_INTERVAL_S
        self._registry.publish(self._registry.num_due if idle else _PER_MOMENT)

    def _note_histograms(self) -> None:
        for name, histogram in self._request_histograms.items():
            self._of_requests[name].note(histogram.counts())
        if self._stats is not None:
            for name, counts in self._stats.histograms.items():
                self._of_engine[name].note(counts)
            self._stats = None

    def _take(self, clock: RequestClock, index: int, number: int, now: float) -> None:
        answer = clock.answers.get(index)
        if answer is not None:
            self._observe_gap((now - answer.latest) / number, number)
            answer.latest = now
            answer.num_tokens += number
            return
        if not clock.answers:
            self._observe_first_token(now - clock.started)
        if number > 1:  # they came with the first
            self._observe_gap(0.0, number - 1)
        clock.answers[index] = AnswerClock(now, now, number)

    def _observe_first_token(self, seconds: float) -> None:
        self._request_histograms[_FIRST_TOKEN].observe(seconds)

    def _observe_gap(self, seconds: float, times: int) -> None:
        self._request_histograms[_GAP].observe(seconds, times)


def _finished(reason: FinishReason) -> Read:
    return lambda stats: stats.finished.get(reason, 0)

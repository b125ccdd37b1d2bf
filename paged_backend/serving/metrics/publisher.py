"""Reports a model's metrics at Triton's metrics endpoint, under vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from paged_backend.serving.metrics.engine_metrics import VLLM_PREFIX, EngineMetrics
from paged_backend.serving.metrics.registry import Registry
from paged_backend.serving.metrics.stat_logger import AnswerClock, RequestClock, StatLogger
from paged_backend.values.histogram import RunningHistogram
from paged_backend.values.outputs import EngineStats, SequenceOutput
from paged_backend.values.request import Request, RequestLimits

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


class MetricsPublisher(StatLogger):
    """Reports the engines' counts and the latencies of this instance's requests.

    The series of several engines have the label ``engine``, as vLLM's. Series of requests do not.

    Args:
        families: Triton's ``MetricFamily`` class.
        labels: model and version.
        prefix: prefix of the families' names.
        limits: limits of the loaded model.
        num_engines: number of the model's engines.
    """

    def __init__(
        self,
        families: Any,
        labels: Mapping[str, str],
        prefix: str,
        limits: RequestLimits,
        num_engines: int,
    ) -> None:
        if prefix == VLLM_PREFIX:  # its dashboards know models by that label
            labels = {**labels, "model_name": labels["model"]}
        self._registry = registry = Registry(families, labels)
        numbers = [{"engine": str(number)} for number in range(num_engines)]
        self._engines = [
            EngineMetrics(registry.with_labels(**label), prefix, limits)
            for label in (numbers if num_engines > 1 else [{}])
        ]
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
        self._histograms_due = 0.0

    def report(self, engine: int, stats: EngineStats, *, anew: bool) -> None:
        """Report the counts; histograms are reported by ``publish``."""
        self._engines[engine].report(stats, anew=anew)

    def report_refused(self, numbers: Mapping[str, int]) -> None:
        """Report the number of refused requests."""
        for reason, counter in self._refused.items():
            counter.show(numbers.get(reason, 0))

    def report_lost(self, engine: int) -> None:
        """Report that an engine has ended."""
        self._engines[engine].report_lost()

    def report_back(self, engine: int, *, restarted: bool) -> None:
        """Report that a new engine is ready."""
        self._engines[engine].report_back(restarted=restarted)

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
        for engine in self._engines:
            engine.note_histograms()

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

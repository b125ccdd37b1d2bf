"""vllm_backend's metric families, for existing dashboards."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from paged_backend.serving.metrics.engine_metrics import VLLM_PREFIX
from paged_backend.serving.metrics.publisher import MetricsPublisher
from paged_backend.serving.metrics.stat_logger import RequestClock
from paged_backend.serving.requests.token_bucket import TokenBucket
from paged_backend.values.request import Request, RequestLimits

# The server needs 20 microseconds for each value, too long for each token of a busy engine.
# Values above the rate wait, and values above the backlog are dropped, the oldest first.
GAPS_PER_S = 1000
BURST = 200
MAX_BACKLOG = 4096

# fmt: off
_FIRST_TOKEN_S = [.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1.0, 2.5, 5.0, 7.5, 10.0]
_GAP_S = [.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1.0, 2.5]
_WHOLE_REQUEST_S = [1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0]
_NUM_ANSWERS = [1.0, 2.0, 5.0, 10.0, 20.0]
# fmt: on


class VllmMetrics(MetricsPublisher):
    """The metrics of :class:`MetricsPublisher`, and vllm_backend's families.

    The histograms of these families have the server's own type, as in vllm_backend. They are too
    slow for every inter-token latency of a busy engine.
    """

    def __init__(
        self,
        families: Any,
        labels: Mapping[str, str],
        prefix: str,
        limits: RequestLimits,
        num_engines: int,
    ) -> None:
        super().__init__(families, labels, prefix, limits, num_engines)
        for engine in self._engines:
            engine.add_vllm_series()
        lengths = list(_one_two_five(limits.max_model_len))
        self._first_token = self._observed(
            "time_to_first_token_seconds",
            "From a request's arrival to its first token",
            _FIRST_TOKEN_S,
        )
        self._gap = self._observed(
            "time_per_output_token_seconds", "From a token to the next of its answer", _GAP_S
        )
        self._whole_request = self._observed(
            "e2e_request_latency_seconds",
            "From a request's arrival to its last token",
            _WHOLE_REQUEST_S,
        )
        self._prompt_tokens = self._observed(
            "request_prompt_tokens", "Prompt tokens of a request", lengths
        )
        self._generation_tokens = self._observed(
            "request_generation_tokens", "Tokens of all answers to a request", lengths
        )
        self._num_answers = self._observed(
            "request_params_n", "Answers asked for by a request", _NUM_ANSWERS
        )
        self._gaps: deque[float] = deque(maxlen=MAX_BACKLOG)
        self._allowance = TokenBucket(GAPS_PER_S, BURST)

    def report_end(self, clock: RequestClock, request: Request) -> None:
        """Record the size and the duration of a request."""
        super().report_end(clock, request)
        self._publish_gaps()  # before the last response, for a client that looks at once
        self._whole_request.observe(time.monotonic() - clock.started)
        self._prompt_tokens.observe(len(request.prompt_token_ids))
        self._generation_tokens.observe(clock.num_tokens)
        self._num_answers.observe(request.params.n)

    def publish(self, *, idle: bool) -> None:
        """Report values as the base class does, and as many inter-token latencies as allowed.

        ``GAPS_PER_S`` limits these latencies. The rest waits, and is dropped above ``MAX_BACKLOG``.
        """
        super().publish(idle=idle)
        self._publish_gaps()

    def _publish_gaps(self) -> None:
        for _ in range(self._allowance.take(len(self._gaps))):
            self._gap.observe(self._gaps.popleft())

    def _observed(self, name: str, help: str, bounds: list[float]) -> Any:
        return self._registry.observed(VLLM_PREFIX + name, help, bounds)

    def _observe_first_token(self, seconds: float) -> None:
        super()._observe_first_token(seconds)
        self._first_token.observe(seconds)

    def _observe_gap(self, seconds: float, times: int) -> None:
        super()._observe_gap(seconds, times)
        self._gaps.extend([seconds] * times)


def _one_two_five(limit: int) -> Iterator[float]:
    """Return 1, 2, 5, 10, 20, 50 and so on up to a limit."""
    for exponent in count():
        for digit in (1, 2, 5):
            value = digit * 10**exponent
            if value > limit:
                return
            yield float(value)

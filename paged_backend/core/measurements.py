"""How long sequences wait and compute, and what a step holds."""

from __future__ import annotations

import time

from paged_backend.core.sequence import Sequence
from paged_backend.histogram import Histogram, HistogramCounts
from paged_backend.outputs import ENGINE_HISTOGRAMS


class Measurements:
    """Counted since the engine started; used by the engine's thread only."""

    def __init__(self) -> None:
        self._histograms = {
            name: Histogram(bounds) for name, (_, bounds) in ENGINE_HISTOGRAMS.items()
        }

    def counts(self) -> dict[str, HistogramCounts]:
        """The counts now, by the names of ``ENGINE_HISTOGRAMS``."""
        return {name: histogram.counts() for name, histogram in self._histograms.items()}

    def step(self, seconds: float, num_sequences: int, num_tokens: int) -> None:
        """A step is over."""
        self._observe("engine_step_seconds", seconds)
        self._observe("engine_step_sequences", num_sequences)
        self._observe("iteration_tokens_total", num_tokens)

    def finished(self, seq: Sequence) -> None:
        """A sequence has ended with an answer; one that never ran has nothing to tell."""
        if seq.admitted_s is None or seq.first_token_s is None:
            return
        now = time.monotonic()
        self._observe("request_queue_time_seconds", seq.admitted_s - seq.queued_s)
        self._observe("request_prefill_time_seconds", seq.first_token_s - seq.admitted_s)
        self._observe("request_decode_time_seconds", now - seq.first_token_s)
        self._observe("request_inference_time_seconds", now - seq.admitted_s)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

"""Applies token edits, penalties and ``min_tokens`` to logits, on the host."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.sampling.recent import Recent
from paged_backend.sampling.token_counts import TokenCounts
from paged_backend.sampling.token_edits import TokenEdits
from paged_backend.values.sampling_params import SamplingParams


def needs_adjustment(spec: SampleSpec) -> bool:
    """Return True if `LogitAdjuster.adjust` may change the logits of a sample."""
    params = spec.params
    return params.adjusts_tokens or params.penalized or spec.num_output_tokens < params.min_tokens


class LogitAdjuster:
    """Applies token edits, penalties and ``min_tokens``, in this order.

    It keeps what it makes of requests and counts of sequences, so that the work of a step grows
    neither with the lists of a request nor with the tokens of a sequence by more than a few array
    operations.
    """

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = eos_token_ids
        self._edits = TokenEdits()
        self._counts: Recent[list[int], TokenCounts] = Recent()
        self._stops: Recent[SamplingParams, NDArray[np.int64]] = Recent()

    def adjust(self, logits: Tensor, samples: Sequence[SampleSpec]) -> None:
        """Change logits in place.

        ``logits`` [R, vocab] float32 has one row per sample, on the host. Rows that need no
        adjustment are not written.
        """
        self._edits.apply(logits, samples)
        self._counts.begin_step()
        self._stops.begin_step()
        with np.errstate(all="ignore"):  # logits may overflow, and may not be finite
            for row, spec in zip(logits.numpy(), samples, strict=True):
                if spec.params.penalized:
                    self._penalize(row, spec)
                if spec.num_output_tokens < spec.params.min_tokens:
                    self._forbid_stops(row, spec.params)

    def _penalize(self, logits: NDArray[np.float32], spec: SampleSpec) -> None:
        params = spec.params
        counts = self._counts.of(spec.token_ids, lambda: TokenCounts(spec, len(logits)))
        counts.update(spec)
        if params.repetition_penalty != 1:
            seen, penalty = counts.seen(), np.float32(params.repetition_penalty)
            old = logits[seen]
            # Positive logits are divided and others multiplied. With a penalty above 1, that is the
            # smaller result for both, and else the larger one; a choice by the sign is slower.
            choose = np.minimum if penalty > 1 else np.maximum
            logits[seen] = choose(old / penalty, old * penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            produced, occurrences = counts.produced()
            amounts = params.frequency_penalty * occurrences + params.presence_penalty
            logits[produced] -= amounts.astype(np.float32)

    def _forbid_stops(self, logits: NDArray[np.float32], params: SamplingParams) -> None:
        logits[self._stops.of(params, lambda: self._stops_of(params, len(logits)))] = -np.inf

    def _stops_of(self, params: SamplingParams, vocab_size: int) -> NDArray[np.int64]:
        stops = np.array([*self._eos_token_ids, *params.stop_token_ids], np.int64)
        return stops[stops < vocab_size]  # the user's stop ids may be of any size

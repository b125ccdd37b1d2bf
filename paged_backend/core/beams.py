"""The policy of beam search: which continuations live on, and when the search ends.

It equals the one of transformers (``GenerationMixin.generate`` with ``num_beams``), in tokens and
in scores. Scores are float32 numbers there, so each sum and quotient is rounded to float32 here.
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from paged_backend.values.outputs import FinishReason, TokenLogprobs
from paged_backend.values.sampling_params import SamplingParams

_FLOAT32 = struct.Struct("<f")


class Child(NamedTuple):
    """A beam after a step: the beam that it continues, and its last token."""

    parent: int  # index among the beams before the step
    token_id: int


class Hypothesis(NamedTuple):
    """An output that is complete, or the part of it that is known."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one for each token
    cumulative: float  # sum of the log-probabilities, in float32
    score: float = 0.0  # sum / length ** length_penalty, once it is complete
    reason: FinishReason | None = None


class _Candidate(NamedTuple):
    parent: int
    place: int  # among the likeliest tokens of the parent
    cumulative: float


class BeamSearch:
    """The beams of one request.

    Args:
        params: the width, the length penalty, and when the search stops early.
        end_token_ids: tokens that complete an output.
        max_tokens: number of tokens after which an output is complete.

    Attributes:
        beams: the incomplete outputs, the best first.
        finished: the best complete outputs, at most ``beam_width`` of them, the best first.
        num_common: number of first tokens that every possible result has in common.
    """

    def __init__(
        self, params: SamplingParams, end_token_ids: frozenset[int], max_tokens: int
    ) -> None:
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._num_top = params.logprobs or 0
        self._end_token_ids = end_token_ids
        self._max_tokens = max_tokens
        self._num_tokens = 0  # output tokens of each beam
        self.num_candidates = num_candidates(self._width, len(end_token_ids))
        self.beams = [Hypothesis([], [], 0.0)]
        self.finished: list[Hypothesis] = []
        self.num_common = 0

    def advance(self, likeliest: list[TokenLogprobs]) -> list[Child]:
        """Add one token to each beam.

        Args:
            likeliest: the ``num_candidates`` likeliest next tokens of each beam.

        Returns:
            The new beams, the best first; none if the search is over.
        """
        self._num_tokens += 1
        is_last = self._num_tokens >= self._max_tokens
        going: list[tuple[Child, Hypothesis]] = []
        complete: list[Hypothesis] = []
        for rank, candidate in enumerate(self._best(likeliest)):
            row = likeliest[candidate.parent]
            token_id = row.top_token_ids[candidate.place]
            is_end = token_id in self._end_token_ids
            if is_end or is_last:
                if rank < self._width:  # the others exist so that enough beams go on
                    reason = FinishReason.STOP if is_end else FinishReason.LENGTH
                    complete.append(self._complete(self._extend(candidate, row), reason))
            elif len(going) < self._width:
                child = Child(candidate.parent, token_id)
                going.append((child, self._extend(candidate, row)))
        # Sorting is stable: among equal scores, an earlier output comes first.
        merged = sorted(self.finished + complete, key=lambda one: -one.score)
        self.finished = merged[: self._width]
        self.beams = [hypothesis for _, hypothesis in going]
        self._count_common()
        return [] if self._is_over() else [child for child, _ in going]

    def _count_common(self) -> None:
        outputs = [one.token_ids for one in (*self.beams, *self.finished)]
        shortest = min(map(len, outputs), default=0)
        while self.num_common < shortest and len({ids[self.num_common] for ids in outputs}) == 1:
            self.num_common += 1

    def _best(self, likeliest: list[TokenLogprobs]) -> list[_Candidate]:
        """Return the best continuations of all beams; among equal ones, in the order of beams.

        A token that the model rules out (with a probability of 0) is no continuation.
        """
        candidates = [
            _Candidate(parent, place, _float32(beam.cumulative + logprob))
            for parent, (beam, row) in enumerate(zip(self.beams, likeliest, strict=True))
            for place, logprob in enumerate(row.top_logprobs)
            if logprob > -math.inf
        ]
        candidates.sort(key=lambda candidate: -candidate.cumulative)
        return candidates[: self.num_candidates]

    def _extend(self, candidate: _Candidate, row: TokenLogprobs) -> Hypothesis:
        beam, place, number = self.beams[candidate.parent], candidate.place, self._num_top
        entry = TokenLogprobs(
            row.top_logprobs[place],
            place + 1,
            row.top_token_ids[:number],
            row.top_logprobs[:number],
        )
        return Hypothesis(
            [*beam.token_ids, row.top_token_ids[place]],
            [*beam.logprobs, entry],
            candidate.cumulative,
        )

    def _complete(self, hypothesis: Hypothesis, reason: FinishReason) -> Hypothesis:
        score = self._score(hypothesis.cumulative, len(hypothesis.token_ids))
        return hypothesis._replace(score=score, reason=reason)

    def _score(self, cumulative: float, length: int) -> float:
        return _float32(cumulative / _float32(length**self._length_penalty))

    def _is_over(self) -> bool:
        """Return True if no beam is left, or none can be better than the complete outputs."""
        if not self.beams or len(self.finished) < self._width:
            return not self.beams
        if self._early_stopping is True:
            return True
        length = self._num_tokens
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        return self._score(self.beams[0].cumulative, length) <= self.finished[-1].score


def num_candidates(width: int, num_end_tokens: int) -> int:
    """Return the number of continuations of which the best become the next beams.

    At least `width` of them do not end with an end token.
    """
    return max(2, 1 + num_end_tokens) * width


def _float32(value: float) -> float:
    number: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    return number

"""Builds the SchedulerOutput of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from paged_backend.core.kv_cache_manager import BlockCopies
from paged_backend.core.scheduler_output import (
    PromptLogprobsSpec,
    SampleSpec,
    ScheduledSequence,
    SchedulerOutput,
)
from paged_backend.core.sequence import Sequence


class ScheduledStep(NamedTuple):
    """A step in flight: the sequences that its output belongs to."""

    sampled: list[Sequence]  # one for each sample
    # Sequences that want prompt logprobs, each with the index of the slice's first entry.
    prompts: list[tuple[Sequence, int]]


class StepBuilder:
    """Collects the slices of a step; ``budget`` is the number of tokens that still fit."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._slices: dict[int, tuple[Sequence, int, BlockCopies]] = {}  # by seq_id

    def add(self, seq: Sequence, num_tokens: int, copies: BlockCopies) -> None:
        """Add the next tokens of a sequence, whose blocks are valid once the copies are made."""
        self._slices[seq.seq_id] = (seq, num_tokens, copies)
        self.budget -= num_tokens

    def remove(self, seq: Sequence) -> None:
        """Remove the slice of a sequence, if it has one."""
        _, num_tokens, _ = self._slices.pop(seq.seq_id, (seq, 0, []))
        self.budget += num_tokens

    def slices(self) -> Iterator[tuple[Sequence, int]]:
        """Each sequence of the step with the number of its tokens."""
        for seq, num_tokens, _ in self._slices.values():
            yield seq, num_tokens

    def build(
        self, siblings: Mapping[int, list[Sequence]], freed_seq_ids: list[int]
    ) -> SchedulerOutput:
        """Return the step for the worker.

        Args:
            siblings: the other completions that start from the same prompt and sample their first
                token in the step that computes its end, by the ``seq_id`` of the first completion.
            freed_seq_ids: sequences that the worker may forget.
        """
        return SchedulerOutput(
            [
                _scheduled(seq, num_tokens, siblings.get(seq.seq_id, ()))
                for seq, num_tokens in self.slices()
            ],
            [copy for _, _, copies in self._slices.values() for copy in copies],
            freed_seq_ids,
        )


def _scheduled(seq: Sequence, num_tokens: int, siblings: Iterable[Sequence]) -> ScheduledSequence:
    start = seq.num_computed_tokens
    end = start + num_tokens
    samples = tuple(_sample_spec(s) for s in (seq, *siblings)) if end == seq.num_tokens else ()
    return ScheduledSequence(
        seq.seq_id,
        seq.token_ids[start:end],
        start,
        list(seq.block_ids),
        samples,
        _prompt_logprobs_spec(seq, start, end) if seq.wants_prompt_logprobs else None,
    )


def _prompt_logprobs_spec(seq: Sequence, start: int, end: int) -> PromptLogprobsSpec:
    num_top = seq.request.params.prompt_logprobs or 0
    return PromptLogprobsSpec(num_top, seq.token_ids[start + 1 : end + 1])


def _sample_spec(seq: Sequence) -> SampleSpec:
    return SampleSpec(
        seq.seq_id,
        seq.request.params,
        seq.seed,
        seq.num_tokens,
        seq.num_prompt_tokens,
        seq.token_ids,
    )

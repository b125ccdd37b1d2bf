"""A step while it is being planned, and what is left of it while it is under way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from paged_backend.core.kv_cache_manager import BlockCopies
from paged_backend.core.scheduler_output import (
    PromptLogprobsSpec,
    SampleSpec,
    ScheduledSequence,
    SchedulerOutput,
)
from paged_backend.core.sequence import Sequence


class UnderWay(NamedTuple):
    """What to do with a plan's result."""

    sampled: list[Sequence]  # of each sample
    prompts: list[tuple[Sequence, int]]  # those that want log-probabilities, from which token on


class Step:
    """What is planned so far; ``budget`` is how many more tokens it may have."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._slices: dict[int, tuple[Sequence, int, BlockCopies]] = {}

    def add(self, seq: Sequence, num_tokens: int, copies: BlockCopies) -> None:
        """Plan the next tokens of a sequence; its blocks are there once the copies are made."""
        self._slices[seq.seq_id] = (seq, num_tokens, copies)
        self.budget -= num_tokens

    def remove(self, seq: Sequence) -> None:
        """Plan nothing of a sequence, if anything was planned."""
        _, num_tokens, _ = self._slices.pop(seq.seq_id, (seq, 0, []))
        self.budget += num_tokens

    def slices(self) -> Iterator[tuple[Sequence, int]]:
        """Each sequence of the plan and how many tokens of it."""
        for seq, num_tokens, _ in self._slices.values():
            yield seq, num_tokens

    def output(self, unforked: dict[int, list[Sequence]], released: list[int]) -> SchedulerOutput:
        """The plan for the model runner.

        Args:
            unforked: answers that begin with the first token of another, by that one's seq_id.
            released: ``seq_id`` of sequences that the runner may forget.
        """
        return SchedulerOutput(
            [
                _scheduled(seq, num_tokens, unforked.get(seq.seq_id, ()))
                for seq, num_tokens in self.slices()
            ],
            [copy for _, _, copies in self._slices.values() for copy in copies],
            released,
        )


def _scheduled(seq: Sequence, num_tokens: int, others: Iterable[Sequence]) -> ScheduledSequence:
    start = seq.num_computed_tokens
    end = start + num_tokens
    samples = tuple(_sample_spec(s) for s in (seq, *others)) if end == seq.num_tokens else ()
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

"""Builds the SchedulerOutput of a step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from paged_backend.core.kv_cache_manager import BlockCopies
from paged_backend.core.scheduler_output import NewSequence, SchedulerOutput, Slice
from paged_backend.core.sequence import Sequence


class ScheduledStep(NamedTuple):
    """A step in flight: the sequences that its output belongs to."""

    sampled: list[Sequence]  # one for each sample
    # Sequences that want prompt logprobs, each with the index of the slice's first entry.
    prompts: list[tuple[Sequence, int]]


class _Known(NamedTuple):
    """What the worker knows of a sequence."""

    num_tokens: int
    num_blocks: int


class WorkerMirror:
    """Remembers what the worker was told, so that each message has differences only."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._known: dict[int, _Known] = {}  # by seq_id

    def forget(self, seq_ids: Iterable[int]) -> None:
        """Note that the worker forgets sequences."""
        for seq_id in seq_ids:
            self._known.pop(seq_id, None)

    def introduce(self, sequences: Iterable[Sequence]) -> Iterator[NewSequence]:
        """Return the sequences that the worker does not know; it knows them from now on."""
        for seq in sequences:
            if seq.seq_id not in self._known:
                token_ids = seq.token_ids[: seq.num_known_tokens]
                self._known[seq.seq_id] = _Known(len(token_ids), 0)
                params, num_prompt_tokens = seq.request.params, seq.num_prompt_tokens
                yield NewSequence(seq.seq_id, params, seq.seed, num_prompt_tokens, token_ids)

    def slice(
        self, seq: Sequence, num_tokens: int, *, is_copied: bool, samples: list[Sequence]
    ) -> Slice:
        """Return the next slice of a known sequence.

        Args:
            seq: the sequence.
            num_tokens: number of tokens to compute.
            is_copied: the first block that is written was replaced by a copy.
            samples: the sequences that sample after the slice.
        """
        known, start = self._known[seq.seq_id], seq.num_computed_tokens
        first_new = known.num_blocks
        if is_copied:
            first_new = min(first_new, start // self._block_size)
        self._known[seq.seq_id] = _Known(seq.num_known_tokens, len(seq.block_ids))
        num_top = seq.request.params.prompt_logprobs or 0
        return Slice(
            seq.seq_id,
            start,
            num_tokens,
            seq.token_ids[known.num_tokens : seq.num_known_tokens],
            first_new,
            seq.block_ids[first_new:],
            [sample.seq_id for sample in samples],
            num_top if seq.wants_prompt_logprobs else None,
        )


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
        self,
        mirror: WorkerMirror,
        siblings: Mapping[int, list[Sequence]],
        freed_seq_ids: list[int],
    ) -> SchedulerOutput:
        """Return the step for the worker.

        Args:
            mirror: what the worker was told before.
            siblings: the other completions that start from the same prompt and sample their first
                token in the step that computes its end, by the ``seq_id`` of the first completion.
            freed_seq_ids: sequences that the worker may forget.
        """
        if not self._slices:
            return SchedulerOutput([], [], [], [])
        mirror.forget(freed_seq_ids)
        new_sequences: list[NewSequence] = []
        slices: list[Slice] = []
        for seq, num_tokens, copies in self._slices.values():
            is_last = seq.num_computed_tokens + num_tokens == seq.num_tokens
            samples = [seq, *siblings.get(seq.seq_id, ())] if is_last else []
            new_sequences += mirror.introduce(samples or [seq])
            slices.append(mirror.slice(seq, num_tokens, is_copied=bool(copies), samples=samples))
        block_copies = [copy for _, _, copies in self._slices.values() for copy in copies]
        return SchedulerOutput(freed_seq_ids, new_sequences, slices, block_copies)

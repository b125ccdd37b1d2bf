"""A step as the model runner needs it: each sequence with its tokens and the whole block table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from paged_backend.core.scheduler_output import DraftGuide, NewSequence
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.values.sampling_params import SamplingParams


class SampleSpec(NamedTuple):
    """One token to sample: its sequence, its position, and the parameters of sampling."""

    seq_id: int
    params: SamplingParams
    seed: int  # 64 bits
    position: int  # position of the token to sample, counted from the first token of the prompt
    num_prompt_tokens: int
    token_ids: list[int]  # read-only: prompt and output so far, possibly with later tokens
    num_candidates: int = 0  # number of likeliest tokens to return for a beam; 0: none
    predicted_token_ids: Sequence[int] = ()  # see NewSequence

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens before the token to sample."""
        return self.position - self.num_prompt_tokens

    @property
    def context(self) -> list[int]:
        """All token ids before the token to sample, prompt and output."""
        return self.token_ids[: self.position]

    @property
    def with_logits(self) -> bool:
        """True if the request asks for the logits that the token is sampled from.

        The logits of the first token count as logits of the prompt, too.
        """
        params = self.params
        is_first = self.num_output_tokens == 0
        return params.return_generation_logits or (params.return_context_logits and is_first)


class PromptLogprobsSpec(NamedTuple):
    """The prompt logprobs that a slice computes.

    The logits of each token in the slice give the log-probability of the token that follows it.
    """

    num_top: int
    token_ids: list[int]  # the token after the slice's first token, after its second, and so on
    with_logits: bool = False  # return the logits as well


class PoolSpec(NamedTuple):
    """The rows of a slice that are pooled into the embedding of its sequence."""

    seq_id: int
    first_row: int  # index in the slice
    num_rows: int
    is_first: bool  # no earlier slice has rows that are pooled
    # If the slice ends the prompt: the number of rows that are pooled in all slices.
    total: int | None


class ScheduledSequence(NamedTuple):
    """One slice: consecutive tokens of one sequence for the step to compute."""

    seq_id: int
    token_ids: list[int]  # PLACEHOLDER for a token that the previous step is still sampling
    start: int  # position of the slice's first token
    # Read-only: the block tables of all groups, interleaved, up to the slice's end. An entry may be
    # anything if no token of the slice sees its block.
    block_ids: list[int]
    samples: tuple[SampleSpec, ...]  # at the position of each draft and after the slice
    prompt_logprobs: PromptLogprobsSpec | None = None
    first_new_block: int = 0  # index in block_ids before which nothing has changed
    num_draft_tokens: int = 0  # trailing token_ids that are guesses
    pool: PoolSpec | None = None  # rows to pool if the model makes embeddings, and samples nothing
    adapter: str = ""  # the digest of its LoRA adapter; empty: none
    # Number of drafts in flight before the slice. The device moves the slice back by the number of
    # wrong ones.
    max_move: int = 0
    reference_token_ids: Sequence[int] = ()  # see Slice

    @property
    def draws_drafts(self) -> bool:
        """True if the worker draws the drafts."""
        return self.num_draft_tokens > 0 and self.token_ids[-1] == PLACEHOLDER

    def moved_back(self, number: int) -> ScheduledSequence:
        """Return the slice at earlier positions, as `number` drafts before it were wrong."""
        samples = [spec._replace(position=spec.position - number) for spec in self.samples]
        return self._replace(start=self.start - number, samples=tuple(samples))

    def with_drafts(self, drafts: list[int]) -> ScheduledSequence:
        """Return the slice with drafts in place of all of its placeholders."""
        given = self.token_ids[: -self.num_draft_tokens]
        return self._replace(
            token_ids=given + drafts,
            samples=self.samples[: 1 + len(drafts)],
            num_draft_tokens=len(drafts),
        )


@dataclass(slots=True)
class WorkerSequence:
    """What the worker knows about a sequence."""

    new: NewSequence
    token_ids: list[int]  # known tokens, then drafts or placeholders of steps in flight
    num_known: int
    block_ids: list[int] = field(default_factory=list)  # the block tables, interleaved

    def continue_after(self, token_id: int) -> None:
        """Add a token that has become known, and the token that the next step computes."""
        # In place, because samples in flight read the list.
        if len(self.token_ids) > self.num_known:
            self.token_ids[self.num_known] = token_id
            self.token_ids.append(PLACEHOLDER)
        else:
            self.token_ids.append(token_id)
        self.num_known += 1

    def sample(self, position: int) -> SampleSpec:
        """Return the token to sample at a position."""
        new = self.new
        return SampleSpec(
            new.seq_id,
            new.params,
            new.seed,
            position,
            new.num_prompt_tokens,
            self.token_ids,
            new.num_candidates,
            new.predicted_token_ids,
        )


class ContinuedSequences(NamedTuple):
    """The decodes of the previous step that compute and sample one more token.

    The decodes of a step are its continued ones and the first ``num_decodes`` of the scheduled
    ones.
    """

    dropped: list[int]  # indices of the previous step's decodes that do not continue
    sequences: list[WorkerSequence]  # the others; the last token is the one to compute
    entering: list[int]  # indices of sequences with a token that is the first of new blocks


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step, and the block copies to make before the step computes its tokens."""

    continued: ContinuedSequences  # they come before the scheduled ones
    scheduled: list[ScheduledSequence]
    num_decodes: int  # number of first scheduled sequences that the next step may continue
    block_copies: list[tuple[int, int]]  # (from, to), in this order
    freed_seq_ids: list[int]  # sequences that gave up their blocks since the last step
    # For each sequence, the slots of the states that it reads and writes; empty if no layer keeps
    # a state.
    state_slots: list[tuple[int, int]] = field(default_factory=list)
    guide: DraftGuide | None = None  # the tokens that the draft model may draw; None: all
    # Distance from the token of a row to its input token. It is 1 for an MTP layer, whose input for
    # token i is token i + 1, and otherwise 0.
    lead: int = 0

    @property
    def adapters(self) -> list[str]:
        """The digest of each sequence's LoRA adapter, in their order; empty for none."""
        return [seq.new.adapter for seq in self.continued.sequences] + [
            item.adapter for item in self.scheduled
        ]

    @classmethod
    def of(cls, scheduled: list[ScheduledSequence], lead: int = 0) -> ScheduledBatch:
        """Return a step of these sequences, which continues none and which none continues.

        Args:
            scheduled: the sequences.
            lead: number of places from the token of a row to the token that is its input.
        """
        return cls(ContinuedSequences([], [], []), scheduled, 0, [], [], lead=lead)

    def with_drafts(self, drafts: Mapping[int, list[int]]) -> ScheduledBatch:
        """Return the step with other drafts for some sequences, by ``seq_id``."""
        scheduled = [
            item.with_drafts(drafts[item.seq_id]) if item.seq_id in drafts else item
            for item in self.scheduled
        ]
        return replace(self, scheduled=scheduled)

    def all_sequences(self) -> Iterator[ScheduledSequence]:
        """Yield all sequences of the step, also the continued ones."""
        for seq in self.continued.sequences:
            end = len(seq.token_ids)
            yield ScheduledSequence(
                seq.new.seq_id,
                seq.token_ids[-1:],
                end - 1,
                seq.block_ids,
                (seq.sample(end),),
                first_new_block=len(seq.block_ids),
            )
        yield from self.scheduled

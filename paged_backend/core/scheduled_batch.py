"""A step as the model runner needs it: every sequence with its tokens and its whole block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.sampling_params import SamplingParams


class SampleSpec(NamedTuple):
    """One token to sample."""

    seq_id: int
    params: SamplingParams
    seed: int  # 64 bits
    position: int  # of the token to sample, counted from the first token of the prompt
    num_prompt_tokens: int
    token_ids: list[int]  # read-only: prompt and output so far, possibly with later tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated before this one."""
        return self.position - self.num_prompt_tokens

    @property
    def context(self) -> list[int]:
        """All tokens before this one."""
        return self.token_ids[: self.position]


class PromptLogprobsSpec(NamedTuple):
    """A request for the log-probabilities of the prompt tokens that follow a slice's tokens."""

    num_top: int
    token_ids: list[int]  # the token after the slice's first token, after its second, and so on


class ScheduledSequence(NamedTuple):
    """A slice of one sequence's tokens that the step computes."""

    seq_id: int
    token_ids: list[int]  # PLACEHOLDER for a token that the previous step is still sampling
    start: int  # position of the slice's first token
    block_ids: list[int]  # read-only: covers every position up to the slice's end
    samples: tuple[SampleSpec, ...]  # after the slice's last token and before each draft
    prompt_logprobs: PromptLogprobsSpec | None = None
    first_new_block: int = 0  # index in block_ids before which nothing has changed
    num_draft_tokens: int = 0  # trailing token_ids that are guesses


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """All slices of one step and the block copies that precede them."""

    scheduled: list[ScheduledSequence]
    block_copies: list[tuple[int, int]]  # (from, to), in this order
    freed_seq_ids: list[int]  # sequences that gave up their blocks since the last step

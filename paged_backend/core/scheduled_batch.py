"""A step as the model runner needs it: each slice with its tokens and the whole block table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from paged_backend.sampling_params import SamplingParams


class SampleSpec(NamedTuple):
    """One token to sample: its sequence, its position, and the parameters of sampling."""

    seq_id: int
    params: SamplingParams
    seed: int  # 64 bits
    position: int  # of the token to sample, counted from the first token of the prompt
    num_prompt_tokens: int
    token_ids: list[int]  # read-only: prompt and output so far, possibly with later tokens

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
    first_row: int  # of the slice
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
    pool: PoolSpec | None = None  # of a model that makes embeddings, which samples nothing


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """All slices of one step, and the block copies to make before the step computes them."""

    scheduled: list[ScheduledSequence]
    block_copies: list[tuple[int, int]]  # (from, to), in this order
    freed_seq_ids: list[int]  # sequences that gave up their blocks since the last step

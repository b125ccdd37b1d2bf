"""The messages between the scheduler and the worker: what a step computes, and its result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paged_backend.outputs import TokenLogprobs
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
    block_ids: list[int]  # covers every position up to the slice's end
    samples: tuple[SampleSpec, ...]  # from the slice's last token; empty within a prompt
    prompt_logprobs: PromptLogprobsSpec | None = None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """All slices of one step and the block copies that precede them."""

    scheduled: list[ScheduledSequence]
    block_copies: list[tuple[int, int]]  # (from, to), in this order
    freed_seq_ids: list[int]  # sequences that gave up their blocks since the last step

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(len(item.token_ids) for item in self.scheduled)

    def describe(self) -> str:
        """The step for a log: sizes, positions and blocks, but no token ids."""
        slices = [
            f"sequence {item.seq_id}: {len(item.token_ids)} tokens from position {item.start}, "
            f"{len(item.samples)} samples, blocks {item.block_ids}"
            for item in self.scheduled
        ]
        copies = f"block copies {self.block_copies}, freed sequences {self.freed_seq_ids}"
        return "; ".join([f"{self.num_tokens} tokens", *slices, copies])


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of a step, in the order of its SchedulerOutput."""

    token_ids: list[int]  # one for each sample
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index in token_ids
    # For each slice that has a PromptLogprobsSpec.
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)


class PendingOutput(Protocol):
    """The output of a step that may be in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output."""
        ...

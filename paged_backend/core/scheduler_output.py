"""The plan of one step, as a value: it can be logged, saved, replayed or sent to other ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paged_backend.outputs import TokenLogprobs
from paged_backend.sampling_params import SamplingParams


class SampleSpec(NamedTuple):
    """One token to be sampled."""

    seq_id: int
    params: SamplingParams
    seed: int  # 64 bits
    position: int  # of the token to be sampled, counted from the prompt's first
    num_prompt_tokens: int
    token_ids: list[int]  # prompt and output so far and maybe more; read-only

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated before this one."""
        return self.position - self.num_prompt_tokens

    @property
    def context(self) -> list[int]:
        """All tokens before this one."""
        return self.token_ids[: self.position]


class PromptLogprobsSpec(NamedTuple):
    """Log-probabilities wanted of the prompt's tokens that follow a slice's first ones."""

    num_top: int
    token_ids: list[int]  # the token after the slice's first, after its second, and so on


class ScheduledSequence(NamedTuple):
    """A slice of one sequence's tokens that the step computes."""

    seq_id: int
    token_ids: list[int]  # PENDING where the step before has yet to say which
    start: int  # position of the slice's first token
    block_ids: list[int]  # covers every position up to the slice's end
    samples: tuple[SampleSpec, ...]  # from the slice's last token; empty for part of a prompt
    prompt_logprobs: PromptLogprobsSpec | None = None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """All slices of one step and the block copies that go before them."""

    scheduled: list[ScheduledSequence]
    block_copies: list[tuple[int, int]]  # (from, to), in this order
    released: list[int]  # seq_ids that gave up their blocks since the last plan

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(item.token_ids) for item in self.scheduled)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What a step found out, in the order of its plan."""

    token_ids: list[int]  # one for each of the plan's samples
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by place in token_ids
    # For each slice that has a PromptLogprobsSpec.
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)


class PendingOutput(Protocol):
    """The output of a step that may be in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output."""
        ...

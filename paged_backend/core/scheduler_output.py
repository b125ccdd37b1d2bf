"""The messages between the scheduler and the worker: what a step computes, and its result.

A SchedulerOutput has differences only: its size grows with the tokens of the step, not with the
length of the sequences. A worker that has received every message since the start can compute the
step; :class:`paged_backend.core.worker_state.WorkerState` puts the differences together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paged_backend.outputs import TokenLogprobs
from paged_backend.sampling_params import SamplingParams


class NewSequence(NamedTuple):
    """A sequence that the worker does not know, or has forgotten since it was preempted."""

    seq_id: int
    params: SamplingParams
    seed: int  # 64 bits
    num_prompt_tokens: int
    token_ids: list[int]  # all tokens that are known


class Slice(NamedTuple):
    """The consecutive tokens of one sequence that the step computes."""

    seq_id: int
    start: int  # position of the first token
    num_tokens: int
    new_token_ids: list[int]  # tokens that have become known since the worker was told last
    first_new_block: int  # index in the block table from which it is replaced
    new_block_ids: list[int]
    sample_seq_ids: list[int]  # sequences that sample a token after the slice's last one
    num_prompt_logprobs: int | None = None  # top tokens for each prompt logprob; None for none


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step."""

    freed_seq_ids: list[int]  # sequences to forget, before anything else
    new_sequences: list[NewSequence]
    slices: list[Slice]
    block_copies: list[tuple[int, int]]  # (from, to), in this order, before the step

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return sum(item.num_tokens for item in self.slices)

    def describe(self) -> str:
        """The step for a log: sizes, positions and blocks, but no token ids."""
        slices = [
            f"sequence {item.seq_id}: {item.num_tokens} tokens from position {item.start}, "
            f"{len(item.sample_seq_ids)} samples, blocks from {item.first_new_block} on "
            f"{item.new_block_ids}"
            for item in self.slices
        ]
        copies = f"block copies {self.block_copies}, freed sequences {self.freed_seq_ids}"
        return "; ".join([f"{self.num_tokens} tokens", *slices, copies])


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of a step, in the order of its SchedulerOutput."""

    token_ids: list[int]  # one for each sample
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)  # by index in token_ids
    # For each slice that has prompt logprobs.
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)


class PendingOutput(Protocol):
    """The output of a step that may be in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output."""
        ...

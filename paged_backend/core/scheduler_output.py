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
    # Trailing tokens of the slice that are guesses; a token is sampled before each of them, too.
    draft_token_ids: list[int]
    sample_seq_ids: list[int]  # sequences that sample a token after the slice's last one
    num_prompt_logprobs: int | None  # top tokens for each prompt logprob; None for none


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
            f"{_drafts(item)}{len(item.sample_seq_ids)} samples, "
            f"blocks from {item.first_new_block} on {item.new_block_ids}"
            for item in self.slices
        ]
        copies = f"block copies {self.block_copies}, freed sequences {self.freed_seq_ids}"
        return "; ".join([f"{self.num_tokens} tokens", *slices, copies])


def _drafts(item: Slice) -> str:
    number = len(item.draft_token_ids)
    return f"{number} of them drafts, " if number else ""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of a step, in the order of its SchedulerOutput."""

    # For each sequence that samples: its new tokens. They are one more than the drafts of its
    # slice that were right.
    token_ids: list[list[int]]
    # By index in token_ids: one for each of the tokens.
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # For each slice that has prompt logprobs.
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)


class TokenMasks(NamedTuple):
    """The tokens that some samples of a step may choose from."""

    indices: list[int]  # of the samples, in the order of the step
    # For each of them ceil(vocab_size / 32) little-endian words of 32 bits: bit t % 32 of word
    # t // 32 is set if token t is allowed.
    bits: bytes


class PendingOutput(Protocol):
    """The output of a step that may be in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output."""
        ...


class LaunchedStep(Protocol):
    """A step whose forward pass has been launched, and that samples no token yet.

    The host has time to compute masks while the device computes the forward pass.
    """

    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        """Sample the tokens; it must be called once, before the next step is launched."""
        ...

"""The messages between the scheduler and the worker: what a step computes, and its result.

A SchedulerOutput contains only what has changed since the previous one. Its size grows with the
number of tokens in the step, not with the length of the sequences. A worker must therefore receive
every message since the start; :class:`paged_backend.core.worker_state.WorkerState` restores the
complete tokens and block tables from them.

Most sequences of most steps decode one token, as in the step before. They need no Slice each: their
arrays follow from those of the step before (:class:`ContinuedDecodes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from paged_backend.values.outputs import TokenLogprobs
from paged_backend.values.sampling_params import SamplingParams


class NewSequence(NamedTuple):
    """A sequence that the worker has not seen, or has forgotten because it was preempted."""

    seq_id: int
    params: SamplingParams
    seed: int  # 64 bits
    num_prompt_tokens: int
    token_ids: list[int]  # all tokens that are known
    num_candidates: int = 0  # number of likeliest tokens to return for a beam; 0: none
    adapter: str = ""  # the digest of its LoRA adapter; empty: none
    # The prediction of the request, if the device draws drafts from texts.
    predicted_token_ids: list[int] = []


class Slice(NamedTuple):
    """Consecutive tokens of one sequence for the step to compute."""

    seq_id: int
    # Position of the first token. After drafts in flight, it is as if all of them were right.
    start: int
    num_tokens: int
    new_token_ids: list[int]  # tokens that have become known since the worker was told last
    # Index from which the block tables are replaced; see KVCacheManager. The worker is not told of
    # freed blocks that no later token sees.
    first_new_block: int
    new_block_ids: list[int]
    # Trailing tokens of the slice that are guesses; a token is sampled at each one's position, too.
    # The worker's draft model, or the device, draws those that are placeholders.
    draft_token_ids: list[int]
    sample_seq_ids: list[int]  # sequences that sample a token after the slice's last one
    num_prompt_logprobs: int | None  # top tokens for each prompt logprob; None for none
    # If not empty, a text that takes the place of the reference or the prediction of the sequence;
    # see Draft.
    reference_token_ids: list[int] = []


class ContinuedDecodes(NamedTuple):
    """The decodes of the previous step that compute and sample one more token.

    The decodes of a step are its continued ones, followed by its first ``num_decodes`` slices. They
    keep their order.
    """

    dropped: list[int]  # indices of the previous step's decodes that do not continue
    # For each of the others, the token that has become known since the worker was told last.
    new_token_ids: list[int]
    # Those of the others that enter a new block: their indices and their new blocks, one for each
    # KV cache group.
    new_block_ids: list[tuple[int, list[int]]]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The message that tells the worker what one step computes."""

    freed_seq_ids: list[int]  # sequences to forget, before anything else
    new_sequences: list[NewSequence]
    continued: ContinuedDecodes  # they come before the slices
    slices: list[Slice]
    num_decodes: int  # number of first slices that the next step may continue
    block_copies: list[tuple[int, int]]  # (from, to), in this order, before the step
    # For each sequence of the step, the slots of the states that it reads and writes; empty if no
    # layer keeps a state.
    state_slots: list[tuple[int, int]] = field(default_factory=list)

    @property
    def num_sequences(self) -> int:
        """Number of sequences that the step computes tokens of; 0 if there is no step."""
        return len(self.continued.new_token_ids) + len(self.slices)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return len(self.continued.new_token_ids) + sum(item.num_tokens for item in self.slices)

    def describe(self) -> str:
        """Return a summary for the log: sizes, positions and blocks, but no token ids."""
        parts = [f"{self.num_tokens} tokens"]
        number = len(self.continued.new_token_ids)
        if number:
            parts.append(
                f"{number} continued decodes, without {self.continued.dropped}, "
                f"new blocks {self.continued.new_block_ids}"
            )
        parts += [
            f"sequence {item.seq_id}: {item.num_tokens} tokens from position {item.start}, "
            f"{_drafts(item)}{len(item.sample_seq_ids)} samples, "
            f"blocks from {item.first_new_block} on {item.new_block_ids}"
            for item in self.slices
        ]
        copies = f"block copies {self.block_copies}, freed sequences {self.freed_seq_ids}"
        return "; ".join([*parts, copies])


def _drafts(item: Slice) -> str:
    number = len(item.draft_token_ids)
    return f"{number} of them drafts, " if number else ""


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """The result of a step, in the order of the SchedulerOutput: continued decodes, then slices."""

    # For each sequence that samples: its new tokens. A slice with drafts gives one token more than
    # it has right drafts.
    token_ids: list[list[int]]
    # By index in token_ids: the logprobs of each new token of that sequence.
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    # For each slice that has prompt logprobs.
    prompt_logprobs: list[list[TokenLogprobs]] = field(default_factory=list)
    # From a model that makes embeddings, instead of tokens: the pooled hidden states of each
    # sequence whose prompt ends in the step, hidden_size numbers in little-endian float32.
    pooled: list[bytes] = field(default_factory=list)
    # By seq_id: of the drafts that the device has drawn, the number of first ones that are from the
    # prediction; without zeros.
    num_predicted: dict[int, int] = field(default_factory=dict)


class TokenMasks(NamedTuple):
    """The tokens that are allowed for some of the samples of a step."""

    indices: list[int]  # indices of the samples, in the order of the step
    # For each of them the same number of little-endian words of 32 bits, at least
    # ceil(vocab_size / 32): bit t % 32 of word t // 32 is set if token t is allowed.
    bits: bytes


class PendingOutput(Protocol):
    """A handle to the output of a step that may still be in flight."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the step and return its output."""
        ...


class DraftGuide(Protocol):
    """Tells which tokens grammars allow, while a draft model in the same process draws drafts."""

    def mask(self, seq_id: int, draft_token_ids: list[int]) -> bytes | None:
        """Return the mask of the token after some drafts of a sequence; see TokenMasks.

        It is None if all tokens are allowed, and empty if there should be no further draft. The
        drafts of a sequence follow each other: each call has one more than the call before it.
        """
        ...


class DraftPass(NamedTuple):
    """A forward pass of a draft model, and the sampling of its drafts."""

    num_tokens: int  # that the draft model computes
    num_drafts: int  # at most one for each sequence
    seconds: float


class DrawnDrafts(NamedTuple):
    """What the worker has drawn for a step, and the passes of its draft model."""

    # The drafts that stand in place of placeholders, by seq_id; none for a sequence that the draft
    # model could not draft for in this step. Those that are in flight are placeholders until the
    # output of the step is there, and so are the passes missing that draw them.
    token_ids: Mapping[int, list[int]]
    passes: list[DraftPass]


class LaunchedStep(Protocol):
    """A step after the launch of its forward pass and before the launch of its sampling.

    Meanwhile, the host can compute token masks while the device computes the forward pass.
    """

    def greedy_token_ids(self) -> Mapping[int, int]:
        """Return the tokens that some samples have if no mask forbids them, by index of the sample.

        These are greedy samples of a forward pass that is over. A sample needs no mask if its token
        is allowed. By default there are none, since a device is still computing.
        """
        return {}

    def drawn_drafts(self) -> DrawnDrafts | None:
        """Return what the draft model has drawn; None if the step needed no drafts of it."""
        return None

    def drafts_from_texts(self) -> Mapping[int, list[int]]:
        """Wait for the drafts that the device has drawn from texts, by ``seq_id``.

        The tokens of the steps before this one are known. By default there are none.
        """
        return {}

    def sample(self, masks: TokenMasks | None = None) -> PendingOutput:
        """Launch sampling. Call this exactly once, before the next step is launched."""
        ...

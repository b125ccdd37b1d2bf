"""What comes out: of a step for one sequence, and of a whole request for the offline API."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # cancelled by its caller


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the probabilities at one position, before any adjustment."""

    logprob: float  # of the token that stands there
    rank: int  # how many tokens are at least as likely, itself included
    top_token_ids: list[int]  # the likeliest first
    top_logprobs: list[float]


@dataclass(frozen=True, slots=True)
class SequenceOutput:
    """New tokens of one sequence after a step; the last one carries the finish reason."""

    request_id: str
    index: int  # which of the request's n answers
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens that were served from the prefix cache
    logprobs: list[TokenLogprobs] | None = None  # one for each new token, if asked for
    # With the first token, if asked for: one for each token of the prompt after its first.
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine started and its present state."""

    num_waiting: int
    num_running: int
    block_size: int
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int  # free blocks whose content can still be found
    num_used_slots: int  # tokens stored in used blocks, shared ones counted once
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cache_hits: int  # prompt tokens found in the prefix cache
    num_steps: int
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> sequences

    @property
    def utilization(self) -> float:
        """Part of the slots of used blocks that hold a token; 1 while none is used."""
        if self.num_used_blocks == 0:
            return 1.0
        return self.num_used_slots / (self.num_used_blocks * self.block_size)


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt of :meth:`paged_backend.LLM.generate`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs] | None = None

"""Outputs: of a step for one sequence, and of a whole request for the offline API."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import zip_longest
from typing import NamedTuple

from paged_backend.values.histogram import HistogramCounts


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # end-of-sequence token, stop token or stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # cancelled by its client
    CACHE_THRESHOLD = "cache_threshold"  # too little of the prompt was cached
    # No token satisfied the grammar and all other parameters, or the grammar took too long.
    ERROR = "error"


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the probabilities at one position, before any adjustment."""

    logprob: float  # log-probability of the token at the position
    rank: int  # number of tokens that are at least as likely, itself included
    top_token_ids: list[int]  # the likeliest first
    top_logprobs: list[float]
    logits: bytes | None = None  # logits of the whole vocabulary, in float32, if asked for


class SequenceTimes(NamedTuple):
    """Moments in the life of a sequence, in seconds of the machine's monotonic clock."""

    arrival_s: float  # at the engine
    first_scheduled_s: float
    first_token_s: float


class DraftCounts(NamedTuple):
    """Numbers of guessed tokens (drafts) that steps have verified for one sequence."""

    num_tokens: int = 0
    num_accepted: int = 0  # that were right, and are part of the output
    # The same for the drafts that come from the prediction of the request.
    num_predicted: int = 0
    num_predicted_accepted: int = 0

    def plus(self, other: DraftCounts) -> DraftCounts:
        """Return the sums of both."""
        return DraftCounts(*map(sum, zip(self, other, strict=True)))

    def limited(self, num_output_tokens: int) -> DraftCounts:
        """Return the counts of a draft after the output was cut to this number of tokens."""
        return self._replace(
            num_accepted=min(self.num_accepted, num_output_tokens),
            num_predicted_accepted=min(self.num_predicted_accepted, num_output_tokens),
        )


@dataclass(slots=True)  # frozen ones take a microsecond to make, of which a step makes hundreds
class SequenceOutput:
    """New tokens of one sequence after a step; the last one carries the finish reason."""

    request_id: str
    index: int  # number of the completion, from 0 to n - 1
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0  # prompt tokens that were served from the prefix cache
    logprobs: list[TokenLogprobs] | None = None  # one for each new token, if asked for
    # With the first token, if asked for: one for each token of the prompt after its first.
    prompt_logprobs: list[TokenLogprobs] | None = None
    times: SequenceTimes | None = None  # with the first token
    # Instead of tokens, if asked for: the pooled hidden states, in float32.
    pooled: bytes | None = None
    problem: str = ""  # why the request has failed, if it has
    drafts: DraftCounts | None = None  # drafts that the step has verified


_SECONDS = (
    *(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
    *(20.0, 40.0, 60.0, 120.0, 300.0),
)
_STEP_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075),
    *(0.1, 0.25, 0.5, 1.0, 2.5),
)

ENGINE_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "request_queue_time_seconds": ("From arrival at the engine to the first step", _SECONDS),
    "request_prefill_time_seconds": ("From the first step to the first token", _SECONDS),
    "request_decode_time_seconds": ("From the first token to the last", _SECONDS),
    "request_inference_time_seconds": ("From the first step to the last token", _SECONDS),
    "engine_step_seconds": ("Of one step", _STEP_SECONDS),
    "engine_step_sequences": ("Sequences of one step", tuple(2.0**n for n in range(10))),
    "iteration_tokens_total": ("Tokens of one step", tuple(2.0**n for n in range(15))),
}
"""What the engine measures: name -> description and upper bounds of its buckets.

The first four are of each sequence that ended with an answer, so ``n`` answers count ``n`` times.
"""


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One unfinished sequence; a block in several block tables is shared."""

    request_id: str
    index: int
    status: str  # waiting or running
    num_prompt_tokens: int
    num_tokens: int
    num_computed_tokens: int
    block_ids: list[int]  # that it holds, in the order of tokens, of all KV cache groups


@dataclass(frozen=True, slots=True)
class EngineView:
    """The sequences and blocks of an engine at one moment, for inspection."""

    block_size: int
    num_blocks: int  # the null block included
    sequences: list[SequenceView]
    cached_block_ids: list[int]  # free blocks with content that can still be found


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counts since the engine started and its present state."""

    num_waiting: int
    num_running: int
    block_size: int
    num_blocks: int  # 0 without a KV cache
    num_used_blocks: int
    num_cached_blocks: int  # free blocks with content that can still be found
    # Tokens stored in used blocks, shared ones counted once; each KV cache group stores a token.
    num_used_slots: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int
    num_forced_tokens: int  # generated tokens that a grammar forced
    num_cache_hits: int  # prompt tokens found in the prefix cache
    num_steps: int
    num_drafts: int = 0  # guesses of one or more tokens that steps have verified
    num_draft_tokens: int = 0
    # By the place of a token in its draft: how often it was right, and all tokens before it.
    num_accepted_at: tuple[int, ...] = ()
    running_adapters: tuple[str, ...] = ()  # names of the LoRA adapters of running sequences
    waiting_adapters: tuple[str, ...] = ()
    kv_bytes_per_token: int = 0  # in all layers, with the scales of quantized numbers
    num_state_slots: int = 0  # slots that states can take; 0 for a model without states
    num_used_state_slots: int = 0
    finished: dict[str, int] = field(default_factory=dict)  # finish reason -> sequences
    histograms: dict[str, HistogramCounts] = field(default_factory=dict)  # as ENGINE_HISTOGRAMS

    @property
    def kv_usage(self) -> float:
        """The fraction of blocks in use; 0 without a KV cache."""
        return self.num_used_blocks / self.num_blocks if self.num_blocks else 0.0

    @property
    def utilization(self) -> float:
        """The fraction of slots of used blocks that hold a token; 1 if no block is used."""
        if self.num_used_blocks == 0:
            return 1.0
        return self.num_used_slots / (self.num_used_blocks * self.block_size)

    @property
    def num_accepted_tokens(self) -> int:
        """Number of draft tokens that were right."""
        return sum(self.num_accepted_at)

    def after(self, earlier: EngineStats) -> EngineStats:
        """Return the present state, with the counts of an engine that has ended added."""
        return replace(
            self,
            num_preemptions=self.num_preemptions + earlier.num_preemptions,
            num_prompt_tokens=self.num_prompt_tokens + earlier.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens + earlier.num_generation_tokens,
            num_forced_tokens=self.num_forced_tokens + earlier.num_forced_tokens,
            num_cache_hits=self.num_cache_hits + earlier.num_cache_hits,
            num_steps=self.num_steps + earlier.num_steps,
            num_drafts=self.num_drafts + earlier.num_drafts,
            num_draft_tokens=self.num_draft_tokens + earlier.num_draft_tokens,
            num_accepted_at=tuple(
                map(sum, zip_longest(self.num_accepted_at, earlier.num_accepted_at, fillvalue=0))
            ),
            finished=dict(Counter(self.finished) + Counter(earlier.finished)),
            histograms={
                name: counts.plus(earlier.histograms[name])
                for name, counts in self.histograms.items()
            },
        )


class QueueState(NamedTuple):
    """The occupancy of the queue, for admission control."""

    num_waiting: int  # requests with a first completion that waits
    num_waiting_tokens: int
    num_free_seqs: int  # number of sequences that may start


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None = None
    problem: str = ""  # why it ended with an error, if the engine knows it
    stop_reason: str | int | None = None  # the stop string or stop token that ended it


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One answer of a beam search."""

    tokens: list[int]  # the prompt's, then those of the answer with the one that ends it
    cum_logprob: float  # sum of the log-probabilities of the answer's tokens
    text: str  # text of the answer
    logprobs: list[TokenLogprobs]  # one for each token of the answer
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The answers to one prompt of :meth:`paged_backend.LLM.beam_search`, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of one prompt of :meth:`paged_backend.LLM.embed`."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts: a reranker's, or the cosine similarity of their embeddings."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of one pair of texts of :meth:`paged_backend.LLM.score`."""

    request_id: str  # id of the pair, or of the second text
    outputs: ScoringOutput
    prompt_token_ids: list[int]  # tokens of the pair, or of the first text, then of the second
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All completions of one prompt of :meth:`paged_backend.LLM.generate`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    prompt_logprobs: list[TokenLogprobs] | None = None

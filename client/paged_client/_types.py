"""Results of requests: chunks of a stream, or a whole Completion with its timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A candidate token for a position, and its log-probability.

    ``rank`` is 1 for the most likely token. ``text`` is the token decoded alone; ``content`` is its
    exact bytes, even if they are only a part of a character.
    """

    token_id: int
    logprob: float
    rank: int
    text: str
    content: bytes


Position = tuple[TokenLogprob, ...]
"""The token at a position, then the most likely others in order of rank."""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call; the first part of a call has its ``id`` and the function's ``name``.

    ``arguments`` are new characters of the arguments, which are JSON in the end. ``index`` is the
    call's in its completion.
    """

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; ``arguments`` is a JSON object as text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class PredictionTokens:
    """Tokens of a request's ``prediction`` that one completion was compared with.

    ``accepted`` ones are part of the completion, and ``rejected`` ones are not.
    """

    accepted: int
    rejected: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part that one response adds to one completion; ``index`` is the completion's, below n.

    ``num_output_tokens`` is the number of tokens in this chunk: a server that generates faster than
    the client reads packs several into one chunk. ``finish_reason`` is None until the completion's
    last chunk. ``logprobs`` has one position per token, if requested; ``prompt_logprobs`` come with
    the first chunk, and the prompt's first token has none. ``reasoning`` and ``tool_calls`` are
    parts of a parsed answer that ``text`` leaves out. A parsed answer's last chunk has the stop
    string that ended it as ``stop_reason``, if one did. ``prediction_tokens`` are those of the
    completion so far; None for a request without a ``prediction``.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    index: int = 0
    num_cached_tokens: int = 0
    logprobs: tuple[Position, ...] = ()
    prompt_logprobs: tuple[Position | None, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    stop_reason: str = ""
    prediction_tokens: PredictionTokens | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """The embedding of one prompt: ``vector`` is [dimensions] float32."""

    vector: NDArray[np.float32]
    num_input_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Score:
    """The score of a pair of texts by a reranker."""

    value: float
    num_input_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of a model, as its server reports them.

    ``embedding_size`` is the number of numbers in an embedding; 0 if the model makes none. A
    reranker has ``scores_pairs``. ``max_loras`` is 0 if requests cannot name LoRA adapters;
    ``adapters`` are the folders of those that they can name.
    """

    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    embedding_size: int = 0
    scores_pairs: bool = False
    max_loras: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One completion in flight in the engine; a block listed by several sequences is shared."""

    request_id: str  # digest of the id, equal for all completions of a request
    index: int  # index of the completion, from 0 to n - 1
    status: str  # waiting or running
    num_prompt_tokens: int
    num_tokens: int  # prompt and output so far
    num_computed_tokens: int  # tokens with K and V in the blocks
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine's sequences and blocks at one moment."""

    block_size: int
    num_blocks: int  # including the null block 0, which no sequence owns
    sequences: tuple[SequenceView, ...]
    cached_block_ids: tuple[int, ...]  # free blocks with content that the prefix cache can reuse


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished completion of a prompt (one of n)."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Position, ...] = ()
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    stop_reason: str = ""
    prediction_tokens: PredictionTokens | None = None

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Completion:
    """All n completions of one prompt, and their timing in seconds as measured by this client.

    ``ttft_s`` is the TTFT. ``itl_s`` has one ITL for every token after the first of its completion:
    tokens that arrive together share the gap before them equally. ``latency_s`` is the end-to-end
    latency, to the end of the last completion. ``num_cached_tokens`` is the number of prompt tokens
    that were not computed again.
    """

    answers: tuple[Answer, ...]
    num_input_tokens: int
    ttft_s: float
    itl_s: tuple[float, ...]
    latency_s: float
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[Position | None, ...] = ()

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens of the first completion."""
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first completion ended: ``stop``, ``length`` or ``abort``."""
        return self.answers[0].finish_reason

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens of all completions."""
        return sum(answer.num_output_tokens for answer in self.answers)

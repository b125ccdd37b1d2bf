"""What a caller gets back: chunks of a stream, or a whole answer with its timing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token that could stand at a position, and the logarithm of its probability.

    ``rank`` is 1 for the likeliest. ``text`` is what the token alone decodes to; where that is
    only a part of a character, ``content`` has its bytes all the same.
    """

    token_id: int
    logprob: float
    rank: int
    text: str
    content: bytes


Position = tuple[TokenLogprob, ...]
"""The token that stands at a position, then the likeliest others in order of rank."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one response adds to one answer; ``index`` tells the answers of ``n > 1`` apart.

    ``num_output_tokens`` counts this chunk's tokens: a server that is ahead of its reader packs
    several into one chunk. ``finish_reason`` is None until the answer's last chunk. ``logprobs``
    has one position for each token, if asked for; ``prompt_logprobs`` come with the first chunk,
    and the prompt's first token has none.
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


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model says about itself."""

    max_model_len: int
    vocab_size: int
    has_chat_template: bool


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One answer that the engine has under way; a block in several of these is shared."""

    request_id: str  # a digest of it, equal for the answers of one request
    index: int  # which of the request's n answers
    status: str  # waiting or running
    num_prompt_tokens: int
    num_tokens: int  # of prompt and output so far
    num_computed_tokens: int  # those whose K and V are in the blocks
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine's sequences and blocks at one moment."""

    block_size: int
    num_blocks: int  # the null block 0, which nobody owns, included
    sequences: tuple[SequenceView, ...]
    cached_block_ids: tuple[int, ...]  # free blocks whose content can be found


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer to a prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[Position, ...] = ()

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers to one prompt and how long they took, in seconds, as this client saw it.

    ``ttft_s`` is the time to the first token. ``itl_s`` has one value for every token after its
    answer's first: tokens that came together share the gap before them equally. ``latency_s``
    runs to the end of the last answer. ``num_cached_tokens`` of the prompt were not computed again.
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
        """Text of the first answer."""
        return self.answers[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens of the first answer."""
        return self.answers[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why the first answer ended: ``stop``, ``length`` or ``abort``."""
        return self.answers[0].finish_reason

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens of all answers."""
        return sum(answer.num_output_tokens for answer in self.answers)

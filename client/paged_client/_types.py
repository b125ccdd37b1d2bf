"""What a caller gets back: chunks of a stream, or a whole answer with its timing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one response adds to one answer; ``index`` tells the answers of ``n > 1`` apart.

    ``num_output_tokens`` counts this chunk's tokens: a server that is ahead of its reader packs
    several into one chunk. ``finish_reason`` is None until the answer's last chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished answer to a prompt."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str

    @property
    def num_output_tokens(self) -> int:
        """Number of generated tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Completion:
    """All answers to one prompt and how long they took, in seconds, as this client saw it.

    ``ttft_s`` is the time to the first token. ``itl_s`` has one value for every token after its
    answer's first: tokens that came together share the gap before them equally. ``latency_s``
    runs to the end of the last answer.
    """

    answers: tuple[Answer, ...]
    num_input_tokens: int
    ttft_s: float
    itl_s: tuple[float, ...]
    latency_s: float

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

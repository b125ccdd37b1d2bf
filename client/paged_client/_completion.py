"""Assembles the chunks of a stream into a Completion and measures their timing."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from paged_client._types import (
    Answer,
    Chunk,
    Completion,
    Position,
    PredictionTokens,
    ToolCall,
    ToolCallDelta,
)


@dataclass(slots=True)
class _PartialAnswer:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Position] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    tool_calls: list[list[ToolCallDelta]] = field(default_factory=list)  # the parts of each call
    finish_reason: str = ""
    stop_reason: str = ""
    prediction_tokens: PredictionTokens | None = None
    last_token_at: float | None = None

    def add(self, chunk: Chunk) -> None:
        """Add a chunk of this answer."""
        self.texts.append(chunk.text)
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.reasoning.append(chunk.reasoning)
        for part in chunk.tool_calls:
            if part.index == len(self.tool_calls):
                self.tool_calls.append([])
            self.tool_calls[part.index].append(part)
        self.finish_reason = chunk.finish_reason or ""
        self.stop_reason = chunk.stop_reason
        self.prediction_tokens = chunk.prediction_tokens

    def build(self) -> Answer:
        """Return the whole answer."""
        return Answer(
            "".join(self.texts),
            tuple(self.token_ids),
            self.finish_reason,
            tuple(self.logprobs),
            "".join(self.reasoning),
            tuple(map(_whole_call, self.tool_calls)),
            self.stop_reason,
            self.prediction_tokens,
        )


def _whole_call(parts: list[ToolCallDelta]) -> ToolCall:
    arguments = "".join(part.arguments for part in parts)
    return ToolCall(parts[0].id or "", parts[0].name or "", arguments)


class CompletionBuilder:
    """Builds a Completion: create it when the request is sent, and add each chunk as it arrives."""

    def __init__(self) -> None:
        self._started_at = perf_counter()
        self._ended_at = self._started_at
        self._first_token_at: float | None = None
        self._num_input_tokens = 0
        self._num_cached_tokens = 0
        self._prompt_logprobs: tuple[Position | None, ...] = ()
        self._itl_s: list[float] = []
        self._answers: dict[int, _PartialAnswer] = {}

    def add(self, chunk: Chunk) -> None:
        """Add a chunk that has just arrived."""
        now = perf_counter()
        answer = self._answers.setdefault(chunk.index, _PartialAnswer())
        answer.add(chunk)
        self._num_input_tokens = chunk.num_input_tokens
        self._num_cached_tokens = chunk.num_cached_tokens
        self._prompt_logprobs = self._prompt_logprobs or chunk.prompt_logprobs
        self._ended_at = now
        if chunk.num_output_tokens:
            self._time_tokens(answer, chunk.num_output_tokens, now)

    def build(self) -> Completion:
        """Return the Completion; call this when the stream has ended."""
        first_token_at = self._ended_at if self._first_token_at is None else self._first_token_at
        return Completion(
            answers=tuple(answer.build() for _, answer in sorted(self._answers.items())),
            num_input_tokens=self._num_input_tokens,
            ttft_s=first_token_at - self._started_at,
            itl_s=tuple(self._itl_s),
            latency_s=self._ended_at - self._started_at,
            num_cached_tokens=self._num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _time_tokens(self, answer: _PartialAnswer, count: int, now: float) -> None:
        if answer.last_token_at is None:
            self._itl_s.extend([0.0] * (count - 1))
        else:
            self._itl_s.extend([(now - answer.last_token_at) / count] * count)
        answer.last_token_at = now
        if self._first_token_at is None:
            self._first_token_at = now

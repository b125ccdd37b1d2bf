"""Converts chunks of streams and whole completions to choices of OpenAI's completions."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Protocol

from paged_client import (
    Answer,
    Chunk,
    Completion,
    Position,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
)
from paged_client.gateway.events import Json


class ChoiceFormat(Protocol):
    """The differences between chat and text completion responses; one object per request."""

    id_prefix: ClassVar[str]
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]
    counts_output: bool

    def choices(self, prompt: int, chunk: Chunk) -> list[Json]:
        """Convert a chunk of one of the prompts to choices of a stream."""

    def choice(self, prompt: int, index: int, completion: Completion) -> Json:
        """Convert a whole completion of one of the prompts to a choice."""

    def extras(self, completions: Sequence[Completion]) -> Json:
        """Return the fields of a whole response in addition to its choices."""


class ChatCompletionFormat:
    """The format of ``/v1/chat/completions``."""

    id_prefix: ClassVar[str] = "chatcmpl-"
    whole_object: ClassVar[str] = "chat.completion"
    chunk_object: ClassVar[str] = "chat.completion.chunk"
    counts_output = True

    def __init__(
        self, *, num_top: int | None, with_prompt_logprobs: bool, with_reasoning: bool
    ) -> None:
        self._num_top = num_top  # most likely tokens to show; None: no log-probabilities at all
        self._with_prompt_logprobs = with_prompt_logprobs
        self._with_reasoning = with_reasoning
        self._begun: set[int] = set()

    def choices(self, prompt: int, chunk: Chunk) -> list[Json]:
        """Return a first choice with the role, and a choice with the chunk unless it is empty."""
        choices = []
        if chunk.index not in self._begun:
            self._begun.add(chunk.index)
            choices.append(_chat_choice(chunk.index, {"role": "assistant", "content": ""}))
        if chunk.reasoning and self._with_reasoning:
            choices.append(_chat_choice(chunk.index, _reasoning(chunk.reasoning)))
        if chunk.text or chunk.finish_reason or chunk.logprobs or chunk.tool_calls:
            logprobs = self.logprobs(chunk.logprobs)
            delta: Json = {"content": chunk.text} if chunk.text or not chunk.tool_calls else {}
            if chunk.tool_calls:
                delta["tool_calls"] = list(map(_tool_call_delta, chunk.tool_calls))
            choices.append(_chat_choice(chunk.index, delta, logprobs, chunk.finish_reason))
        return choices

    def choice(self, prompt: int, index: int, completion: Completion) -> Json:
        """Return a choice with the message and its finish reason."""
        answer = completion.answers[index]
        content = answer.text if answer.text or not answer.tool_calls else None
        message: Json = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning and self._with_reasoning:
            message |= _reasoning(answer.reasoning)
        if answer.tool_calls:
            message["tool_calls"] = list(map(_tool_call, answer.tool_calls))
        return {
            "index": index,
            "message": message,
            "logprobs": self.logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }

    def extras(self, completions: Sequence[Completion]) -> Json:
        """Return the prompt's log-probabilities in vLLM's format, if requested."""
        if not self._with_prompt_logprobs:
            return {}
        return {"prompt_logprobs": prompt_logprobs_json(completions[0].prompt_logprobs)}

    def logprobs(self, positions: Sequence[Position]) -> Json | None:
        """Return the log-probabilities of tokens; None if they were not requested."""
        if self._num_top is None:
            return None
        content = [
            {
                **_chat_token(position[0]),
                "top_logprobs": [_chat_token(token) for token in _top(position, self._num_top)],
            }
            for position in positions
        ]
        return {"content": content, "refusal": None}


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """The text before a completion; has a ``first_token`` if log-probabilities are requested."""

    text: str = ""
    first_token: str | None = None


@dataclass(slots=True)
class _Columns:
    """Log-probabilities of one text completion choice; the next token begins at ``offset``."""

    num_top: int
    offset: int = 0
    # Sampled bytes may be invalid UTF-8; the text has replacement characters for them, too.
    decoder: codecs.IncrementalDecoder = field(
        default_factory=partial(codecs.getincrementaldecoder("utf-8"), errors="replace")
    )

    def write(self, positions: Iterable[Position]) -> Json:
        """Return each column for the next tokens."""
        columns: Json = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for position in positions:
            token = position[0]
            shown = {*_top(position, self.num_top), token}
            ranked = sorted(shown, key=lambda token: token.rank, reverse=True)
            columns["tokens"].append(_name(token))
            columns["token_logprobs"].append(token.logprob)
            # The most likely comes last, so that it wins if two tokens have the same name.
            by_name = {_name(token): token.logprob for token in ranked}
            columns["top_logprobs"].append(dict(reversed(by_name.items())))
            columns["text_offset"].append(self.offset)
            self.offset += len(self.decoder.decode(token.content))
        return columns


class CompletionFormat:
    """The format of ``/v1/completions``; choices are ordered by prompt."""

    id_prefix: ClassVar[str] = "cmpl-"
    whole_object: ClassVar[str] = "text_completion"
    chunk_object: ClassVar[str] = "text_completion"

    def __init__(
        self,
        *,
        n: int,
        num_top: int | None,
        echoed: Sequence[EchoedPrompt] | None,
        with_output: bool,
        with_prompt_logprobs: bool,
    ) -> None:
        self.counts_output = with_output
        self._n = n
        self._num_top = num_top
        self._echoed = echoed
        self._with_prompt_logprobs = with_prompt_logprobs
        self._prompt_logprobs: dict[int, Sequence[Position | None]] = {}
        self._columns: dict[int, _Columns] = {}

    def choices(self, prompt: int, chunk: Chunk) -> list[Json]:
        """Return one choice or none; the first one begins with the prompt if it is echoed."""
        if chunk.prompt_logprobs:
            self._prompt_logprobs[prompt] = chunk.prompt_logprobs
        index = prompt * self._n + chunk.index
        if not (chunk.text or chunk.finish_reason or chunk.logprobs or index not in self._columns):
            return []
        return [self._choice(prompt, chunk.index, chunk.text, chunk.logprobs, chunk.finish_reason)]

    def choice(self, prompt: int, index: int, completion: Completion) -> Json:
        """Return a choice with the text and its finish reason."""
        self._prompt_logprobs[prompt] = completion.prompt_logprobs
        answer: Answer = completion.answers[index]
        choice = self._choice(prompt, index, answer.text, answer.logprobs, answer.finish_reason)
        if self._with_prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs_json(completion.prompt_logprobs)
        return choice

    def extras(self, completions: Sequence[Completion]) -> Json:
        """Return no additional fields."""
        return {}

    def _choice(
        self,
        prompt: int,
        index: int,
        text: str,
        positions: Sequence[Position],
        finish_reason: str | None,
    ) -> Json:
        number = prompt * self._n + index
        if not self.counts_output:
            text, positions = "", ()
        begins = number not in self._columns
        columns = self._columns.setdefault(number, _Columns(self._num_top or 0))
        before: Json = {}
        if begins and self._echoed is not None:
            echoed = self._echoed[prompt]
            text = echoed.text + text
            before = self._prompt_columns(prompt, echoed, columns)
        logprobs = None
        if self._num_top is not None:
            logprobs = {
                name: before.get(name, []) + column
                for name, column in columns.write(positions).items()
            }
        return {
            "index": number,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _prompt_columns(self, prompt: int, echoed: EchoedPrompt, columns: _Columns) -> Json:
        """Return the log-probabilities of a prompt; its first token has none."""
        if echoed.first_token is None:
            columns.offset = len(echoed.text)
            return {}
        first: Json = {
            "tokens": [echoed.first_token],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [0],
        }
        # A token that the tokenizer has added is not in the text.
        columns.offset = len(echoed.first_token) * echoed.text.startswith(echoed.first_token)
        rest = columns.write(p for p in self._prompt_logprobs[prompt] if p is not None)
        columns.offset = len(echoed.text)
        return {name: first[name] + rest[name] for name in first}


def _chat_choice(
    index: int, delta: Json, logprobs: Json | None = None, finish_reason: str | None = None
) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}


def _reasoning(text: str) -> Json:
    """Return reasoning by both of the names that clients know."""
    return {"reasoning": text, "reasoning_content": text}


def _tool_call(call: ToolCall) -> Json:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _tool_call_delta(part: ToolCallDelta) -> Json:
    if part.id is None:
        return {"index": part.index, "function": {"arguments": part.arguments}}
    function = {"name": part.name, "arguments": part.arguments}
    return {"index": part.index, "id": part.id, "type": "function", "function": function}


def _chat_token(token: TokenLogprob) -> Json:
    return {"token": token.text, "logprob": token.logprob, "bytes": list(token.content)}


def _top(position: Position, count: int) -> list[TokenLogprob]:
    return [token for token in sorted(position, key=lambda t: t.rank) if token.rank <= count]


def _name(token: TokenLogprob) -> str:
    """Return a token's text, or for a part of a character its bytes in OpenAI's notation."""
    if token.text.encode(errors="replace") == token.content:
        return token.text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.content)


def prompt_logprobs_json(positions: Iterable[Position | None]) -> list[Json | None]:
    """Return a prompt's log-probabilities in vLLM's format."""
    return [
        None
        if position is None
        else {
            str(token.token_id): {
                "logprob": token.logprob,
                "rank": token.rank,
                "decoded_token": token.text,
            }
            for token in position
        }
        for position in positions
    ]

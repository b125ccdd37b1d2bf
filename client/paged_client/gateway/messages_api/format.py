"""Writes the answer of ``/v1/messages``, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from pydantic_core import from_json

from paged_client import Chunk, Completion
from paged_client.gateway.blocks import Block, BlockEvent, BlockReader, blocks_of, check_end
from paged_client.gateway.errors import ApiError
from paged_client.gateway.events import Json, typed_event
from paged_client.gateway.usage import Usage

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_FIELDS = {
    "stop": "stop_sequences",
    "thinking_token_budget": "thinking.budget_tokens",
    "response_format.json_schema": "output_config.format",
    "text_input": "messages",
    "input_ids": "messages",
}


def message_field(name: str) -> str:
    """Return the API's name for one of the engine's fields."""
    if name.startswith("tools["):
        return name.replace("].function.parameters", "].input_schema").replace("].function", "]")
    for prefix, shown in _FIELDS.items():
        if name == prefix or name.startswith((f"{prefix}.", f"{prefix}[")):
            return shown + name[len(prefix) :]
    return name


class MessagesFormat:
    """The format of ``/v1/messages``; one object per request."""

    field_name = staticmethod(message_field)

    def __init__(self, model: str) -> None:
        self._model = model
        self._usage = Usage()
        self._reader = BlockReader()
        self._has_begun = False
        self._finish_reason = ""
        self._stop_reason = ""  # the stop sequence, if one ended the message

    def whole(self, completions: Sequence[Completion]) -> Json:
        """Return the message. Raises ApiError if the engine did not finish it."""
        (answer,) = completions[0].answers
        check_end(answer.finish_reason)
        self._usage.count_all(completions)
        self._finish_reason, self._stop_reason = answer.finish_reason, answer.stop_reason
        content = [_finished(block) for block in blocks_of(answer)]
        return {**self._message(), "content": content, **self._stop()}

    def events(self, prompt: int, chunk: Chunk) -> bytes:
        """Return the events for a chunk; raises ApiError if the engine did not finish."""
        contents = [] if self._has_begun else [self._beginning(prompt, chunk)]
        self._has_begun = True
        self._usage.count(prompt, chunk)
        if chunk.finish_reason is not None:
            check_end(chunk.finish_reason)
            self._finish_reason, self._stop_reason = chunk.finish_reason, chunk.stop_reason
        for event in self._reader.read(chunk):
            contents += _of_block(event)
        return b"".join(map(typed_event, contents))

    def end(self) -> bytes:
        """Return the events with the stop reason and the token counts."""
        delta = {"type": "message_delta", "delta": self._stop(), "usage": _usage(self._usage)}
        return typed_event(delta) + typed_event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error."""
        return typed_event(error.anthropic_body)

    def _beginning(self, prompt: int, chunk: Chunk) -> Json:
        """Return the event with the message as it is before its first token."""
        self._usage.count_prompt(prompt, chunk)
        stop = {"stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": {**self._message(), "content": [], **stop}}

    def _message(self) -> Json:
        return {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "usage": _usage(self._usage),
        }

    def _stop(self) -> Json:
        if self._stop_reason and self._finish_reason == "stop":
            return {"stop_reason": "stop_sequence", "stop_sequence": self._stop_reason}
        return {"stop_reason": _STOP_REASONS[self._finish_reason], "stop_sequence": None}


def _of_block(event: BlockEvent) -> Iterator[Json]:
    index = event.block.index
    match event.action:
        case "begin":
            block = _begun(event.block)
            yield {"type": "content_block_start", "index": index, "content_block": block}
        case "grow":
            delta = _delta(event.block, event.text)
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        case "end":
            yield {"type": "content_block_stop", "index": index}


def _begun(block: Block) -> Json:
    match block.kind:
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "text":
            return {"type": "text", "text": ""}
        case "tool_call":
            return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": {}}


def _delta(block: Block, text: str) -> Json:
    match block.kind:
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "text":
            return {"type": "text_delta", "text": text}
        case "tool_call":
            return {"type": "input_json_delta", "partial_json": text}


def _finished(block: Block) -> Json:
    match block.kind:
        case "reasoning":
            return {**_begun(block), "thinking": block.text}
        case "text":
            return {**_begun(block), "text": block.text}
        case "tool_call":
            return {**_begun(block), "input": _input(block.text)}


def _input(arguments: str) -> Json:
    """Return the input of a call; of one that ``max_tokens`` cut, what there is of it."""
    try:
        value = from_json(arguments or "{}", allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: Usage) -> Json:
    """Return the token counts; ``input_tokens`` are those that were computed."""
    return {
        "input_tokens": usage.num_input_tokens - usage.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.num_cached_tokens,
        "output_tokens": usage.num_output_tokens,
    }

"""Writes the answer of ``/v1/responses``, whole or as events."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence

from paged_client import Chunk, Completion
from paged_client.gateway.blocks import Block, BlockEvent, BlockReader, Kind, blocks_of, check_end
from paged_client.gateway.errors import ApiError
from paged_client.gateway.events import Json, typed_event
from paged_client.gateway.responses_api.schema import ResponsesRequest
from paged_client.gateway.usage import Usage

_PREFIXES = {"reasoning": "rs_", "text": "msg_", "tool_call": "fc_"}
_FIELDS = {
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "text_input": "input",
    "input_ids": "input",
}


class ResponsesFormat:
    """The format of ``/v1/responses``; one object per request."""

    def __init__(self, model: str, body: ResponsesRequest) -> None:
        self._usage = Usage()
        self._reader = BlockReader()
        self._number = 0  # sequence number of the next event
        self._id = _new_id("resp_")
        self._items: list[Json] = []  # those that have begun
        self._finish_reason = ""
        self._head = _head(self._id, model, body)

    def field_name(self, name: str) -> str:
        """Return the API's name for one of the engine's fields."""
        if name.startswith("tools["):
            return name.replace("].function", "]")
        for prefix, shown in _FIELDS.items():
            if name == prefix or name.startswith((f"{prefix}.", f"{prefix}[")):
                return shown + name[len(prefix) :]
        return name

    def whole(self, completions: Sequence[Completion]) -> Json:
        """Return the response. Raises ApiError if the engine did not finish it."""
        (answer,) = completions[0].answers
        check_end(answer.finish_reason)
        self._usage.count_all(completions)
        self._finish_reason = answer.finish_reason
        self._items = [self._item(block, "completed") for block in blocks_of(answer)]
        if self._items and answer.finish_reason == "length":
            self._items[-1]["status"] = "incomplete"
        return self._finished()

    def events(self, prompt: int, chunk: Chunk) -> bytes:
        """Return the events for a chunk; raises ApiError if the engine did not finish."""
        self._usage.count(prompt, chunk)
        contents = [] if self._number else self._beginning()
        if chunk.finish_reason is not None:
            check_end(chunk.finish_reason)
            self._finish_reason = chunk.finish_reason
        events = list(self._reader.read(chunk))
        for event in events:
            is_cut = chunk.finish_reason == "length" and event is events[-1]
            contents += self._of_block(event, is_cut=is_cut)
        return b"".join(map(self._event, contents))

    def end(self) -> bytes:
        """Return the event with the whole response."""
        response = self._finished()
        return self._event({"type": f"response.{response['status']}", "response": response})

    def failure(self, error: ApiError) -> bytes:
        """Return the events of an error."""
        content = error.body["error"]
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = {
            **self._response("failed"),
            "error": {"code": code, "message": content["message"]},
        }
        told = {name: content[name] for name in ("code", "message", "param")}
        return self._event({"type": "error", **told}) + self._event(
            {"type": "response.failed", "response": response}
        )

    def _event(self, content: Json) -> bytes:
        event = typed_event({**content, "sequence_number": self._number})
        self._number += 1
        return event

    def _beginning(self) -> list[Json]:
        response = self._response("in_progress")
        return [
            {"type": f"response.{name}", "response": response}
            for name in ("created", "in_progress")
        ]

    def _of_block(self, event: BlockEvent, *, is_cut: bool) -> Iterator[Json]:
        block = event.block
        match event.action:
            case "begin":
                item = self._item(block, "in_progress")
                self._items.append(item)
                yield {
                    "type": "response.output_item.added",
                    "output_index": block.index,
                    "item": item,
                }
                if block.kind != "tool_call":
                    yield self._part_event("added", block, "")
            case "grow":
                yield self._content_event("delta", block, {"delta": event.text})
            case "end":
                yield from self._block_end(block, "incomplete" if is_cut else "completed")

    def _block_end(self, block: Block, status: str) -> Iterator[Json]:
        name = "arguments" if block.kind == "tool_call" else "text"
        yield self._content_event("done", block, {name: block.text})
        if block.kind != "tool_call":
            yield self._part_event("done", block, block.text)
        item = self._item(block, status, self._items[block.index]["id"])
        self._items[block.index] = item
        yield {"type": "response.output_item.done", "output_index": block.index, "item": item}

    def _content_event(self, step: str, block: Block, content: Json) -> Json:
        """Return the event of a new or finished text, or of a call's arguments."""
        name = {
            "reasoning": "reasoning_text",
            "text": "output_text",
            "tool_call": "function_call_arguments",
        }[block.kind]
        event = {"type": f"response.{name}.{step}", **self._place(block), **content}
        if block.kind == "text":
            event["logprobs"] = []
        if block.kind == "tool_call" and step == "done":
            event["name"] = block.name
        return event

    def _part_event(self, step: str, block: Block, text: str) -> Json:
        part = _part(block.kind, text)
        return {"type": f"response.content_part.{step}", **self._place(block), "part": part}

    def _place(self, block: Block) -> Json:
        place = {"item_id": self._items[block.index]["id"], "output_index": block.index}
        return place if block.kind == "tool_call" else {**place, "content_index": 0}

    def _item(self, block: Block, status: str, item_id: str | None = None) -> Json:
        """Return a block as an item; only the last item of a response may be incomplete."""
        item = {"id": item_id or _new_id(_PREFIXES[block.kind]), "status": status}
        text = "" if status == "in_progress" else block.text
        if block.kind == "tool_call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": text}
            return {"type": "function_call", **item, **call}
        content = [_part(block.kind, text)] if text else []
        if block.kind == "reasoning":
            return {"type": "reasoning", **item, "summary": [], "content": content}
        return {"type": "message", **item, "role": "assistant", "content": content}

    def _finished(self) -> Json:
        """Return the response with its items and usage."""
        if self._finish_reason != "length":
            return {**self._response("completed"), "completed_at": int(time.time())}
        details = {"reason": "max_output_tokens"}
        return {**self._response("incomplete"), "incomplete_details": details}

    def _response(self, status: str) -> Json:
        has_ended = status != "in_progress"
        return {
            **self._head,
            "status": status,
            "output": list(self._items),
            "usage": _usage(self._usage) if has_ended else None,
        }


def _part(kind: Kind, text: str) -> Json:
    """Return the content of a text or of reasoning."""
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _head(response_id: str, model: str, body: ResponsesRequest) -> Json:
    """Return the fields of a response that say what was requested."""
    form = None if body.text is None else body.text.format
    reasoning = body.reasoning
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None,
        },
        "background": False,
        "store": False,
        "temperature": body.temperature,
        "text": {
            "format": {"type": "text"}
            if form is None
            else form.model_dump(by_alias=True, exclude_none=True)
        },
        "tool_choice": body.tool_choice or "auto",
        "tools": body.functions,
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _usage(usage: Usage) -> Json:
    """Return the token counts; tokens of reasoning are not counted apart."""
    return {
        "input_tokens": usage.num_input_tokens,
        "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.num_output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.num_input_tokens + usage.num_output_tokens,
    }


def _new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex

"""Parses JSON bodies: checks limits on the amount of work first; uses a thread for large bodies."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from paged_client.gateway.auth import tenant_of
from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.body import MAX_DEPTH, RequestBody, describe

MAX_CONTAINERS = 2**14  # lists and objects
MAX_STRINGS = 2**16  # including names of fields
MAX_VALUES = 2**20  # as in the longest list of token ids
# Larger bodies are parsed in a thread; for smaller ones a thread switch costs more than parsing.
SMALL_BYTES = 32 * 1024
MAX_WAITING = 64  # large bodies waiting for the thread
MAX_WAITING_OF_ONE = MAX_WAITING // 2  # per tenant, or without API keys per address

# One pass over a piece takes less than a millisecond; other threads run between two pieces.
_PIECE_BYTES = 128 * 1024
_NO_OBJECT = "the body must be a JSON object, with Content-Type: application/json"

Body = TypeVar("Body", bound=RequestBody)


class BodyReader:
    """Parses small bodies immediately and large ones in a thread, one at a time.

    The interpreter runs one thread at a time, so more threads would only slow down the event loop.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bodies")
        self._waiting: Counter[str] = Counter()  # by tenant or address

    async def read(self, request: Request, model: type[Body]) -> Body:
        """Return the body of a request. Raises ApiError."""
        # RequestLimits puts the whole body into one message; nothing else keeps the bytes alive.
        content = (await request.receive())["body"]
        if not content or not _is_json(request.headers.get("content-type", "")):
            raise ApiError(400, _NO_OBJECT)
        if len(content) <= SMALL_BYTES:
            return read_body(content, model)
        owner = tenant_of(request) or (request.client.host if request.client else "")
        return await self._read_in_thread(content, model, owner)

    def close(self) -> None:
        """Stop the thread after its current body."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _read_in_thread(self, content: bytes, model: type[Body], owner: str) -> Body:
        if self._waiting.total() >= MAX_WAITING or self._waiting[owner] >= MAX_WAITING_OF_ONE:
            raise ApiError(
                503,
                f"gateway_busy: {self._waiting[owner]} of your large bodies wait to be read, and "
                f"{self._waiting.total()} in all; retry after 1 s",
                code="gateway_busy",
                headers={"Retry-After": "1"},
            )
        self._waiting[owner] += 1
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, read_body, content, model)
        finally:
            self._waiting[owner] -= 1
            if not self._waiting[owner]:
                del self._waiting[owner]


def body_of(model: type[Body]) -> Callable[[Request], Coroutine[Any, Any, Body]]:
    """Return a FastAPI dependency that parses a request's body as ``model``."""

    async def read(request: Request) -> Body:
        reader: BodyReader = request.app.state.bodies
        return await reader.read(request, model)

    return read


def read_body(content: bytes, model: type[Body]) -> Body:
    """Parse JSON text as ``model``. Raises ApiError."""
    value = parse(content)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise describe(error) from None


def parse(content: bytes) -> dict[str, Any]:
    """Parse a JSON object within the limits on its number of parts and depth. Raises ApiError."""
    num_names = _count_parts(content)
    try:
        value = from_json(content)
    except ValueError as error:
        # The parser's message has the problem and its position, never the text.
        if str(error).startswith("recursion limit exceeded"):
            raise _too_deep() from None
        raise ApiError(400, f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ApiError(400, _NO_OBJECT)
    if _num_different_names(value) != num_names:
        raise ApiError(400, "the body has two fields of the same name in one object")
    return value


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == "application/json" or (
        kind.startswith("application/") and kind.endswith("+json")
    )


def _count_parts(content: bytes) -> int:
    """Return the number of field names; refuse a body with too many parts before it is parsed.

    Counts only characters outside strings, so that a prompt may contain any number of brackets.
    Counts may be wrong for invalid JSON, which the parser refuses.
    """
    num_containers = num_quotes = num_values = num_names = 0
    in_string = False
    rest = b""
    for start in range(0, len(content), _PIECE_BYTES):
        piece = rest + content[start : start + _PIECE_BYTES]
        # Keep a backslash and the character that it escapes in the same piece.
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        rest = piece[len(piece) - num_backslashes % 2 :]
        bare = piece[: len(piece) - len(rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        num_quotes += bare.count(b'"')
        _check_count(num_quotes // 2, MAX_STRINGS, "strings")
        parts = bare.split(b'"')
        outside = b" ".join(parts[in_string::2])
        in_string ^= len(parts) % 2 == 0
        num_containers += outside.count(b"[") + outside.count(b"{")
        _check_count(num_containers, MAX_CONTAINERS, "lists and objects")
        num_values += outside.count(b",")
        _check_count(num_values, MAX_VALUES, "values")
        num_names += outside.count(b":")
    return num_names


def _check_count(number: int, limit: int, what: str) -> None:
    if number > limit:
        raise ApiError(400, f"a body has at most {limit} {what}")


def _num_different_names(body: Any) -> int:
    """Return the number of fields in all objects; raises ApiError if the nesting is too deep."""
    level = [body]
    number = 0
    for _ in range(MAX_DEPTH):
        number += sum(len(container) for container in level if isinstance(container, dict))
        level = [
            item
            for container in level
            for item in (container.values() if isinstance(container, dict) else container)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return number
    raise _too_deep()


def _too_deep() -> ApiError:
    return ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep")

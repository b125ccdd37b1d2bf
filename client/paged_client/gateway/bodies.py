"""Reads JSON bodies: the amount of work is bounded first, and large bodies are read in a thread."""

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
from paged_client.gateway.schema import MAX_DEPTH, RequestBody, describe

MAX_CONTAINERS = 2**14  # lists and objects
MAX_STRINGS = 2**16  # names of fields included
MAX_VALUES = 2**20  # as many as the longest list of token ids has
# A larger body is read in a thread. Thread switches cost more than reading a smaller one takes.
SMALL_BYTES = 32 * 1024
MAX_WAITING = 64  # large bodies that wait for the thread
MAX_WAITING_OF_ONE = MAX_WAITING // 2  # of one tenant, or without API keys of one address

# One pass over a piece takes less than a millisecond; other threads run between two pieces.
_PIECE_BYTES = 128 * 1024
_NO_OBJECT = "the body must be a JSON object, with Content-Type: application/json"

Body = TypeVar("Body", bound=RequestBody)


class BodyReader:
    """Reads small bodies at once and large ones in a thread, one after the other.

    The interpreter runs one thread at a time, so that more threads would only slow the event loop.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "bodies")
        self._waiting: Counter[str] = Counter()  # by whose they are

    async def read(self, request: Request, model: type[Body]) -> Body:
        """The body of a request. Raises ApiError."""
        # The middleware has put the whole body into one message; nothing keeps the bytes.
        content = (await request.receive())["body"]
        if not content or not _is_json(request.headers.get("content-type", "")):
            raise ApiError(400, _NO_OBJECT)
        if len(content) <= SMALL_BYTES:
            return read_body(content, model)
        owner = tenant_of(request) or (request.client.host if request.client else "")
        return await self._read_in_thread(content, model, owner)

    def close(self) -> None:
        """Stop the thread after the body that it reads now."""
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
    """A FastAPI dependency: the body of a request as ``model``."""

    async def read(request: Request) -> Body:
        reader: BodyReader = request.app.state.bodies
        return await reader.read(request, model)

    return read


def read_body(content: bytes, model: type[Body]) -> Body:
    """The body that is in JSON text. Raises ApiError."""
    value = parse(content)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise describe(error) from None


def parse(content: bytes) -> dict[str, Any]:
    """The object that is in JSON text, if it has a bounded number of parts. Raises ApiError."""
    num_names = _count_parts(content)
    try:
        value = from_json(content)
    except ValueError as error:
        # The parser names the problem and its place, never the text.
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
    """Refuse a body of too many parts before anything is made of them; the number of its names.

    Only what stands outside of strings counts, so that a prompt may hold any number of brackets.
    Text that is not valid JSON may be counted wrongly; the parser refuses it.
    """
    num_containers = num_quotes = num_values = num_names = 0
    in_string = False
    rest = b""
    for start in range(0, len(content), _PIECE_BYTES):
        piece = rest + content[start : start + _PIECE_BYTES]
        # A backslash and what it escapes belong to the same piece.
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
    """The number of fields in all objects; refuses what is nested too deeply."""
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

"""Limits on headers and bodies, enforced before a request's content is parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_client.gateway.errors import ApiError

MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024  # of all headers together
BODY_TIMEOUT_S = 30.0
# A larger body is read to its end up to this size, because many clients see no response before they
# have sent all of it.
MAX_DISCARDED_BYTES = 64 * 2**20
DEFAULT_BODY_BYTES = 2**20
# The JSON parser blocks all other threads, for up to 10 ms per MiB.
MIN_BODY_BYTES, MAX_BODY_BYTES = 2**10, 16 * 2**20


class RequestLimits:
    """ASGI middleware that reads whole bodies, up to a limit."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the body in one message, or refuse the request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        try:
            _check_headers(scope["headers"])
            body = await self._read(scope, receive)
        except ApiError as error:
            return await error.response(scope)(scope, receive, send)
        if body is None:
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # otherwise it stays in memory until the response ends

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, or None if the client disconnected. Raises ApiError."""
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if lengths and int(lengths[0]) > MAX_DISCARDED_BYTES:
            raise self._too_large()
        body = bytearray()
        num_bytes = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    piece = message.get("body", b"")
                    num_bytes += len(piece)
                    is_over = not message.get("more_body", False)
                    if num_bytes <= self._max_body_bytes:
                        body += piece
                        if is_over:
                            return bytes(body)
                        continue
                    body.clear()
                    if is_over or num_bytes > MAX_DISCARDED_BYTES:
                        raise self._too_large()
        except TimeoutError:
            raise _refusal(408, f"the body did not come in {BODY_TIMEOUT_S:g} s") from None

    def _too_large(self) -> ApiError:
        problem = f"a body has at most {self._max_body_bytes} bytes"
        return _refusal(413, problem, code="content_too_large")


def _check_headers(headers: Sequence[tuple[bytes, bytes]]) -> None:
    if len(headers) > MAX_HEADERS:
        raise _refusal(431, f"a request has at most {MAX_HEADERS} headers")
    # h11 limits only the bytes that it has not parsed yet, so the total may exceed its limit.
    if sum(len(name) + len(value) for name, value in headers) > MAX_HEADER_BYTES:
        raise _refusal(431, f"all headers together have at most {MAX_HEADER_BYTES} bytes")


def _refusal(status: int, message: str, code: str | None = None) -> ApiError:
    """Return an error that closes the connection, as the rest of the request is not read."""
    return ApiError(status, message, code=code, headers={"Connection": "close"})

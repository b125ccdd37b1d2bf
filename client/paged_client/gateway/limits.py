"""Limits on bodies, enforced before a request's content is parsed."""

from __future__ import annotations

import asyncio
from collections.abc import Container

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paged_client.gateway.errors import ApiError

BODY_TIMEOUT_S = 30.0
DEFAULT_BODY_BYTES = 2**20
# The JSON parser blocks all other threads, for up to 10 ms per MiB.
MIN_BODY_BYTES, MAX_BODY_BYTES = 2**10, 16 * 2**20


_FRAMING = (b"content-length", b"transfer-encoding")


class BodyLimit:
    """ASGI middleware that reads whole bodies, up to a limit.

    Only POST requests have a body for us, except those for ``bodiless`` paths, which need no key.
    Other bodies are not read, and the connection is closed after the response.
    """

    def __init__(
        self, app: ASGIApp, max_body_bytes: int, bodiless: Container[bytes] = frozenset()
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._bodiless = bodiless

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the body in one message, or refuse the request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        body: bytes | None = b""
        has_body = any(name in _FRAMING and value != b"0" for name, value in scope["headers"])
        if scope["method"] == "POST" and scope["raw_path"] not in self._bodiless:
            try:
                body = await self._read(scope, receive)
            except ApiError as error:
                return await error.response(scope)(scope, receive, send)
        elif has_body:
            send = _closing(send)
        if body is None:
            return
        messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body  # otherwise it stays in memory until the response ends

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """Return the body, or None if the client disconnected. Raises ApiError."""
        lengths = [int(value) for name, value in scope["headers"] if name == b"content-length"]
        if lengths and lengths[0] > self._max_body_bytes:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    body += message.get("body", b"")
                    if len(body) > self._max_body_bytes:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise _refusal(408, f"the body did not come in {BODY_TIMEOUT_S:g} s") from None

    def _too_large(self) -> ApiError:
        problem = f"a body has at most {self._max_body_bytes} bytes"
        return _refusal(413, problem, code="content_too_large")


def _closing(send: Send) -> Send:
    """Return ``send`` with the header that announces the end of the connection."""

    async def send_closing(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message)["Connection"] = "close"
        await send(message)

    return send_closing


def _refusal(status: int, message: str, code: str | None = None) -> ApiError:
    """Return an error that closes the connection, as the rest of the request is not read."""
    return ApiError(status, message, code=code, headers={"Connection": "close"})

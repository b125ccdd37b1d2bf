"""Names each request, so that clients and logs can refer to it."""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# The SDKs of OpenAI and Anthropic show the names under different headers.
_HEADERS = ("x-request-id", "request-id")
_NAME = re.compile(r"[\x21-\x7e]{1,128}")


class RequestIds:
    """ASGI middleware that adds the name of a request to its response.

    The name is the client's ``X-Request-Id`` if that is short printable ASCII, or else a new one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, and its response with the name."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = Headers(scope=scope).get(_HEADERS[0], "")
        name = given if _NAME.fullmatch(given) else f"req_{uuid.uuid4().hex}"

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for header in _HEADERS:
                    headers[header] = name
            await send(message)

        await self._app(scope, receive, named)

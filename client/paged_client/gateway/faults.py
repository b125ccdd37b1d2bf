"""Logs the gateway's own faults without their messages, which may contain part of a prompt."""

from __future__ import annotations

import asyncio
import logging
import traceback
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_log = logging.getLogger("uvicorn.error")  # the logger that has a handler


class Faults:
    """ASGI middleware that catches exceptions before the server, and logs their type and place."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward everything unchanged. The server terminates an unfinished response."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            _log.error("internal error: %s", place_of(error))


def log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an uncaught exception; the event loop's exception handler."""
    error = context.get("exception")
    place = place_of(error) if isinstance(error, BaseException) else "no exception"
    _log.error("internal error outside of a request: %s", place)


def place_of(error: BaseException) -> str:
    """Return an exception's type and the places of its last three frames, innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = (f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {', '.join(places)}"

"""Faults of the gateway itself: their texts may hold a part of a prompt, so no log has them."""

from __future__ import annotations

import asyncio
import logging
import traceback
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

_log = logging.getLogger("uvicorn.error")  # the one with a handler


class Faults:
    """ASGI middleware that logs an exception by its type and place, in place of the server."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on as it is. The server ends an answer that is left unfinished."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        try:
            await self._app(scope, receive, send)
        except Exception as error:
            _log.error("internal error: %s", place_of(error))


def log_unhandled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The event loop's handler of exceptions that nothing has caught."""
    error = context.get("exception")
    place = place_of(error) if isinstance(error, BaseException) else "no exception"
    _log.error("internal error outside of a request: %s", place)


def place_of(error: BaseException) -> str:
    """The type of an exception and where it arose."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = (f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {', '.join(places)}"

"""Ends the gateway's requests on shutdown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paged_client import AsyncStream, RequestCancelled
from paged_client.gateway.errors import ApiError


class GatewayDrain:
    """Shutdown in two phases: refuse new requests, then cancel those that still run."""

    def __init__(self) -> None:
        self._has_begun = False
        self._is_over = False
        self._streams: set[AsyncStream[Any]] = set()

    def begin(self) -> None:
        """Refuse requests from now on."""
        self._has_begun = True

    def end_streams(self) -> None:
        """Cancel all running streams."""
        self._is_over = True
        for stream in self._streams:
            stream.cancel()

    def check(self) -> None:
        """Raise ApiError if the drain has begun."""
        if self._has_begun:
            raise stops()

    @contextmanager
    def watching(self, stream: AsyncStream[Any]) -> Iterator[None]:
        """Track a running stream; raises ApiError if ``end_streams`` cancels it."""
        self._streams.add(stream)
        try:
            yield
        except RequestCancelled:
            if self._is_over:
                raise stops() from None
            raise
        finally:
            self._streams.discard(stream)


def stops() -> ApiError:
    """Return the refusal of requests during the drain."""
    message = "draining: the gateway stops; retry after 1 s"
    return ApiError(503, message, code="draining", headers={"Retry-After": "1"})

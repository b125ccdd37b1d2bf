"""How the gateway's requests end when it is told to stop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from paged_client import AsyncStream, RequestCancelled
from paged_client.gateway.errors import ApiError


class GatewayDrain:
    """First no new requests, then an end for those that still run."""

    def __init__(self) -> None:
        self._has_begun = False
        self._is_over = False
        self._streams: set[AsyncStream] = set()

    def begin(self) -> None:
        """Refuse requests from now on."""
        self._has_begun = True

    def end_streams(self) -> None:
        """Cancel what still runs."""
        self._is_over = True
        for stream in self._streams:
            stream.cancel()

    def check(self) -> None:
        """Raise ApiError once requests are refused."""
        if self._has_begun:
            raise _stops()

    @contextmanager
    def watching(self, stream: AsyncStream) -> Iterator[None]:
        """Raises ApiError if the stream is cancelled because time is over."""
        self._streams.add(stream)
        try:
            yield
        except RequestCancelled:
            if self._is_over:
                raise _stops() from None
            raise
        finally:
            self._streams.discard(stream)


def _stops() -> ApiError:
    message = "draining: the gateway stops; retry after 1 s"
    return ApiError(503, message, code="draining", headers={"Retry-After": "1"})

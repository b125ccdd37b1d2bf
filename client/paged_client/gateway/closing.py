"""Closes connections so that clients can read the answer, and so that they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

LINGER_S = 2.0  # without further bytes of the client
MAX_LINGER_S = 30.0
MAX_DISCARDED_BYTES = 64 * 2**20
FLUSH_S = 60.0  # time in which the client must read what is left of a response


class ClosingTransport(asyncio.Transport):
    """A transport that keeps reading for a while after a response that did not need the request.

    A socket that is closed while bytes arrive is reset, and many clients then do not see the
    response, for example that their body is too large. The bytes are dropped without parsing.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        on_close: Callable[[], bool],
    ) -> None:
        """Wrap a transport; ``on_close`` returns whether the client may still be sending."""
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._on_close = on_close
        self._lingers = False
        self._ends_at = 0.0
        self._num_discarded = 0
        self._num_seen = 0
        self._timer: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Close the connection; after the client has sent its request, if that is unread."""
        if self.is_closing():
            return
        if not self._on_close():
            self._transport.close()
            self._timer = self._loop.call_later(FLUSH_S, self.abort)
            return
        self._lingers = True
        self._ends_at = self._loop.time() + MAX_LINGER_S
        try:
            self._transport.resume_reading()
            self._transport.write_eof()
        except OSError:  # the client is gone
            self.abort()
            return
        self._timer = self._loop.call_later(LINGER_S, self._look)

    def discard(self, num_bytes: int) -> None:
        """Count bytes that arrived after ``close``."""
        self._num_discarded += num_bytes
        if self._num_discarded > MAX_DISCARDED_BYTES:
            self.abort()

    def lost(self) -> None:
        """Note that the connection has ended."""
        if self._timer is not None:
            self._timer.cancel()

    def abort(self) -> None:
        """Close the connection at once."""
        self._lingers = True
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether nothing more can be written."""
        return self._lingers or self._transport.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send bytes, unless the connection is closing."""
        if not self._lingers:
            self._transport.write(data)

    def pause_reading(self) -> None:
        """Stop reading, unless the connection is closing."""
        if not self._lingers:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return a property of the connection, such as its socket."""
        return self._transport.get_extra_info(name, default)

    def _look(self) -> None:
        """End the connection, unless bytes have arrived since the last look."""
        if self._num_discarded == self._num_seen or self._loop.time() > self._ends_at:
            self.abort()
            return
        self._num_seen = self._num_discarded
        self._timer = self._loop.call_later(LINGER_S, self._look)

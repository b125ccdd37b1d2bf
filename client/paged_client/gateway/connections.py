"""HTTP connections with a time limit on request headers."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 10.0


class TimedConnection(H11Protocol):
    """Closes a connection whose request headers do not arrive within ``HEADERS_S``.

    The time starts with the connection, and later with the first byte of each request. Between
    requests, a connection may be idle for uvicorn's keep-alive time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start waiting for the first request's headers."""
        super().connection_made(transport)
        self._start_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handle received data; also called after a response, as pipelined data may be waiting."""
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self.conn.trailing_data[0]:
            self._start_waiting()

    def send_400_response(self, msg: str) -> None:
        """Refuse invalid HTTP; a response in flight is not sent any further."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self.transport.close()
                return
        super().send_400_response(msg)

    def _start_waiting(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self._close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        if not self.transport.is_closing():
            self.transport.close()

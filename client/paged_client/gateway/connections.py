"""HTTP connections with limits on time and on work, which uvicorn's connections do not have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from paged_client.gateway.closing import ClosingTransport
from paged_client.gateway.connection_table import ConnectionTable
from paged_client.gateway.cors import Cors
from paged_client.gateway.drain import stops
from paged_client.gateway.errors import ApiError
from paged_client.gateway.http_body import Body
from paged_client.gateway.http_head import MAX_HEADER_BYTES, HeadReader
from paged_client.gateway.refusals import refusal
from paged_client.gateway.turns import Turns

HEADERS_S = 10.0
TURN_PIECES = 256  # chunks of a body that are read at a time; less than a millisecond
READ_AHEAD_BYTES = 64 * 1024  # received before they can be processed


class GatewayConnection(H11Protocol):
    """Gives uvicorn's HTTP parser a head or a part of a body at a time.

    A body is not looked at before the application asks for it, which it does after checking the
    key. Bodies in many pieces are read in turns. A connection closes if a request's headers do not
    arrive within ``HEADERS_S``, from the beginning of the connection, and later from the first
    byte of each request. Between requests, it may be idle for uvicorn's keep-alive time.
    """

    transport: ClosingTransport

    def __init__(
        self, *args: Any, table: ConnectionTable, turns: Turns, cors: Cors, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._table = table
        self._turns = turns
        self._cors = cors
        self._received = bytearray()
        self._heads = HeadReader()
        self._head = b""  # head of the current request
        self._body: Body | None = None  # body of the current request, until its last byte
        self._is_wanted = False  # the application waits for the body
        self._is_refused = False
        self._is_handling = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Start waiting for the first request's headers, or refuse the connection."""
        super().connection_made(ClosingTransport(transport, self.loop, self._on_close))
        self.flow = _Demand(self.transport, self._want)
        refusal = self._table.add(self, self.client[0] if self.client else "")
        if refusal is not None:
            self._refuse(refusal)
            return
        self._start_waiting()
        # It can be evicted only after the event loop has looked for its first request.
        self.loop.call_soon(self.loop.call_soon, self._update)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        self._table.remove(self)
        self._turns.leave(self)
        self.transport.lost()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes from the client."""
        if self.transport.is_closing():
            self.transport.discard(len(data))
            return
        self._unset_keepalive_if_required()
        self._received += data
        if self._body is not None:
            try:
                self._body.count_segment()
            except ApiError as error:
                self._refuse(error)
                return
        self.handle_events()

    def take_turn(self) -> None:
        """Go on with a body in many pieces."""
        self.handle_events()

    def handle_events(self) -> None:
        """Process received bytes; uvicorn calls this after a response, too."""
        if self._is_handling or self in self._turns or self.transport.is_closing():
            return
        self._is_handling = True
        try:
            self._advance()
        except ApiError as error:
            self._refuse(error)
        finally:
            self._is_handling = False
        self._update()

    def on_response_complete(self) -> None:
        """Go on to the next request; close the connection if this one's body is still to come."""
        self._head = b""
        super().on_response_complete()
        if self.cycle.response_complete and self._body is not None:
            self.transport.close()
        self._update()

    def send_400_response(self, msg: str) -> None:
        """Refuse what the parser refuses."""
        self._refuse(ApiError(400, "invalid HTTP request", code="invalid_http"))

    def shutdown(self) -> None:
        """Close the connection after its response, and now if the request is not complete."""
        if self.transport.is_closing():
            return
        if self._body is None:
            super().shutdown()
        else:
            self._refuse(stops())

    def evict(self) -> None:
        """Close the connection at once."""
        self.transport.abort()

    def _advance(self) -> None:
        """Give bytes to the parser until more are needed, or a turn is over. Raises ApiError."""
        while not self.transport.is_closing():
            if self._body is None:
                # After a request, the next one waits for the response.
                head = self._heads.take(self._received) if self._is_idle() else None
                if head is None:
                    return
                self._head, self._body = head
                self._is_wanted = False
                self.conn.receive_data(self._head)
                super().handle_events()
            elif not self._is_wanted or self._read_body(self._body):
                return

    def _read_body(self, body: Body) -> bool:
        """Give a part of a body to the parser; returns whether the rest must wait."""
        content = body.take(self._received, TURN_PIECES)
        if body.is_complete:
            self._body = None
        if content:
            self._is_wanted = False
            self.conn.receive_data(content)
            super().handle_events()
        if body.is_cut:
            self._turns.join(self)
        return body.is_cut or not content

    def _is_idle(self) -> bool:
        return self.conn.their_state is h11.IDLE

    def _want(self) -> None:
        self._is_wanted = True
        self.handle_events()

    def _update(self) -> None:
        """Note what the connection waits for, unless it is closing."""
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            self._table.begin(self)
            self._stop_waiting()
        else:
            self._table.wait(self)
            if self._received:
                self._start_waiting()
        if self in self._turns or len(self._received) > READ_AHEAD_BYTES:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _refuse(self, error: ApiError) -> None:
        """Send an error, unless a response has begun, and close the connection."""
        self._is_refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            head = self._head or bytes(self._received[:MAX_HEADER_BYTES])
            for event in refusal(error, head, self._cors):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def _on_close(self) -> bool:
        """Return whether the client may still be sending a request."""
        self._stop_waiting()
        self._turns.leave(self)
        self._table.wait(self, is_closing=True)
        is_unread = self._is_refused or self._body is not None or bool(self._received)
        self._received.clear()
        return is_unread

    def _should_upgrade(self) -> bool:
        """Answer a request for another protocol in HTTP/1.1, without uvicorn's warning."""
        return False

    def _start_waiting(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS_S, self.transport.close)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class _Demand(FlowControl):
    """Passes on that the application waits for a body; the connection itself paces reading."""

    def __init__(self, transport: asyncio.Transport, on_demand: Callable[[], None]) -> None:
        super().__init__(transport)
        self._on_demand = on_demand

    def pause_reading(self) -> None:
        """Do nothing."""

    def resume_reading(self) -> None:
        """Ask for more of the body."""
        self._on_demand()

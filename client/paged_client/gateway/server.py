"""Runs the gateway as a process."""

from __future__ import annotations

import gc
import signal
import socket
import sys
import time

import uvicorn

from paged_client.gateway.app import create_app
from paged_client.gateway.connections import TimedConnection
from paged_client.gateway.drain import GatewayDrain
from paged_client.gateway.limits import MAX_HEADER_BYTES
from paged_client.gateway.options import GatewayOptions

CLOSE_S = 5  # time for connections to close after the drain
# Longer than clients keep idle connections, so that none closes just when a client reuses it.
KEEP_ALIVE_S = 75
# How long the event loop waits for the thread that parses large bodies; Python's default is 5 ms.
SWITCH_S = 0.0005


def serve(options: GatewayOptions, listener: socket.socket) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM. Must run on the main thread."""
    sys.setswitchinterval(SWITCH_S)
    drain = GatewayDrain()
    config = uvicorn.Config(
        create_app(options, drain),
        http=TimedConnection,  # uses h11, which, unlike httptools, limits the size of headers
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CLOSE_S,
    )
    # A garbage collection over all loaded objects would delay every stream by 20 ms.
    gc.collect()
    gc.freeze()
    # After stopping, uvicorn raises the signal again, which would end the caller. Ignore it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _DrainingServer(config, drain, options.drain_timeout_s).run(sockets=[listener])


class _DrainingServer(uvicorn.Server):
    """After a signal to stop, keeps listening and refuses requests while running ones finish.

    uvicorn alone would close the port first, and clients would find no server.
    """

    def __init__(self, config: uvicorn.Config, drain: GatewayDrain, timeout_s: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._timeout_s = timeout_s
        self._deadline: float | None = None

    async def on_tick(self, counter: int) -> bool:
        """Return True to shut down now; uvicorn calls this ten times a second."""
        if not await super().on_tick(counter):
            return False
        if self._deadline is None:
            self._deadline = time.monotonic() + self._timeout_s
            self._drain.begin()
        is_done = self.force_exit or not self.server_state.tasks
        if not is_done and time.monotonic() < self._deadline:
            return False
        self._drain.end_streams()
        return True

"""Runs the gateway as a process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import signal
import socket
import sys
import time
from functools import partial
from typing import cast

import uvicorn

from paged_client.gateway.app import create_app
from paged_client.gateway.connection_table import ConnectionTable
from paged_client.gateway.connections import GatewayConnection
from paged_client.gateway.drain import GatewayDrain
from paged_client.gateway.http_head import MAX_HEADER_BYTES
from paged_client.gateway.logs import log_config
from paged_client.gateway.options import GatewayOptions
from paged_client.gateway.turns import Turns

CLOSE_S = 5  # time for connections to close after the drain
# Longer than clients keep idle connections, so that none closes just when a client reuses it.
KEEP_ALIVE_S = 75
# How long the event loop waits for the thread that parses large bodies; Python's default is 5 ms.
SWITCH_S = 0.0005
BACKLOG = 2048  # connections that wait in the kernel
# asyncio accepts up to this number before any of them is counted.
ACCEPTED_AT_ONCE = 8
RESERVED_FILES = 64  # files for connections to servers, and for those accepted but not counted yet


def serve(options: GatewayOptions, listener: socket.socket) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM. Must run on the main thread."""
    sys.setswitchinterval(SWITCH_S)
    drain = GatewayDrain()
    max_connections = min(options.max_connections, max_open_files() - RESERVED_FILES)
    table = ConnectionTable(max(max_connections, 1), options.max_connections_per_address)
    connection = partial(GatewayConnection, table=table, turns=Turns(), cors=options.cors)
    config = uvicorn.Config(
        create_app(options, drain),
        # Uses h11: httptools has no limit on the size of headers.
        http=cast(type[asyncio.Protocol], connection),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        backlog=ACCEPTED_AT_ONCE,
        ws="none",
        lifespan="on",
        log_config=log_config(),
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


def max_open_files() -> int:
    """Return how many files this process may open, after raising the number as far as allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft


class _DrainingServer(uvicorn.Server):
    """After a signal to stop, keeps listening and refuses requests while running ones finish.

    uvicorn alone would close the port first, and clients would find no server.
    """

    def __init__(self, config: uvicorn.Config, drain: GatewayDrain, timeout_s: float) -> None:
        super().__init__(config)
        self._drain = drain
        self._timeout_s = timeout_s
        self._deadline: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start; uvicorn's ``backlog`` is also asyncio's for ``accept``, and the kernel's."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

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

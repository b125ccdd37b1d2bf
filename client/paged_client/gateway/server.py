"""The gateway as a process."""

from __future__ import annotations

import signal
import socket

import uvicorn

from paged_client.gateway.app import GatewayOptions, create_app
from paged_client.gateway.limits import MAX_HEADER_BYTES

DRAIN_S = 30  # for open requests when told to stop
# Longer than clients keep idle connections, so that none is closed while it is taken up again.
KEEP_ALIVE_S = 75


def serve(options: GatewayOptions, listener: socket.socket) -> None:
    """Serve on a bound socket until SIGINT or SIGTERM. Must run on the main thread."""
    config = uvicorn.Config(
        create_app(options),
        http="h11",  # unlike httptools, it bounds the size of headers
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=DRAIN_S,
    )
    # uvicorn raises the signal again when it has stopped, to end its caller, which is not wanted.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listener])

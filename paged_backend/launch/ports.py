"""Reserves ports from the moment they are chosen until the server listens on them."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import Self

from paged_backend.values.errors import ConfigError

UNREAD_S = 60  # a connection is closed if its client reads nothing for this time
# Unsent bytes in the kernel, which would otherwise take megabytes for a client that reads slowly.
UNSENT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The IPv4 address and the three ports of one server."""

    address: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP endpoints."""
        return f"http://{self._reachable(self.http_port)}"

    @property
    def grpc_url(self) -> str:
        """Target of the gRPC endpoint: ``host:port`` without a scheme."""
        return self._reachable(self.grpc_port)

    @property
    def metrics_url(self) -> str:
        """URL of the Prometheus metrics."""
        return f"http://{self._reachable(self.metrics_port)}/metrics"

    def _reachable(self, port: int) -> str:
        return reachable(self.address, port)


def reachable(address: str, port: int) -> str:
    """Return the address at which a client on this machine reaches a listener."""
    return f"{'127.0.0.1' if address == '0.0.0.0' else address}:{port}"


class ReservedEndpoints:
    """Reserves three ports (0: any free one) until it is closed.

    The sockets are bound with SO_REUSEADDR and never listen: Linux then lets tritonserver, which
    sets the same option, bind the same ports, and does not assign them as free ports.

    Raises:
        ConfigError: a port is in use.
    """

    def __init__(self, host: str, *, http_port: int, grpc_port: int, metrics_port: int) -> None:
        wanted = {"http-port": http_port, "grpc-port": grpc_port, "metrics-port": metrics_port}
        chosen = [port for port in wanted.values() if port]
        if len(set(chosen)) < len(chosen):
            raise ConfigError(f"--http-port, --grpc-port and --metrics-port must differ: {chosen}")
        self._sockets: list[socket.socket] = []
        try:
            for option, port in wanted.items():
                self._sockets.append(bind(host, port, option))
        except BaseException:
            self.close()
            raise
        http, grpc, metrics = (bound.getsockname()[1] for bound in self._sockets)
        self.endpoints = Endpoints(self._sockets[0].getsockname()[0], http, grpc, metrics)

    def close(self) -> None:
        """Release the ports; a server that listens on them keeps them."""
        for bound in self._sockets:
            bound.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def bind(host: str, port: int, option: str) -> socket.socket:
    """Bind a socket; port 0 stands for any free port. Raises ConfigError, naming ``--option``."""
    if not 0 <= port <= 65535:
        raise ConfigError(f"--{option}: must be between 0 and 65535, got {port}")
    bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ConfigError(_bind_problem(error, host, port, option)) from None
    return bound


def listen(bound: socket.socket) -> None:
    """Start to listen for clients of the gateway; they wait until it serves.

    Accepted connections inherit the options that the listener has when they arrive, so the options
    are set first.
    """
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_S * 1000)
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    bound.listen()


def _bind_problem(error: OSError, host: str, port: int, option: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"--{option}: port {port} is in use; choose another, or 0 for any free one"
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"--host: {host!r} is no IPv4 address of this machine"
    return f"--{option}: cannot listen on {host} port {port}: {error.strerror}"

"""One real server with the demo model, and a gateway in front of it, for all benches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from demo_server import Server

from paged_backend.launch.gateway_process import GatewayProcess
from paged_backend.launch.ports import bind


@dataclass(frozen=True)
class Targets:
    """Where each backend is spoken."""

    server: Server
    gateway: str

    def flags(self, backend: str) -> list[str]:
        running = self.server.running
        urls = {"triton": running.grpc_url, "triton-http": running.http_url}
        return ["--backend", backend, "--base-url", urls.get(backend, self.gateway)]


@pytest.fixture(scope="session")
def targets(server: Server) -> Iterator[Targets]:
    with GatewayProcess(bind("127.0.0.1", 0, "port"), server.running.grpc_url) as gateway:
        yield Targets(server, gateway.address)

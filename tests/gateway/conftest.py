"""One gateway in front of the server of the integration tests."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from gateways import Gateway, running_gateway
from integration.conftest import Server, client, nothing_left, server

__all__ = ["client", "nothing_left", "server"]  # fixtures of these tests, too


@pytest.fixture(scope="session")
def gateway(server: Server) -> Iterator[Gateway]:
    with running_gateway("--triton", server.running.grpc_url) as running:
        yield running


@pytest.fixture(scope="session")
def api(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.sdk() as api:
        yield api

"""One gateway in front of the server that all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import openai
import pytest
from demo_server import MODEL, Server
from gateways import Gateway, running_gateway
from integration.conftest import nothing_left
from thinking_models import write_thinking_model

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server

if TYPE_CHECKING:
    import anthropic

__all__ = ["nothing_left"]  # a fixture of these tests, too


@pytest.fixture(scope="session")
def gateway(server: Server) -> Iterator[Gateway]:
    with running_gateway("--triton", server.running.grpc_url) as running:
        yield running


@pytest.fixture(scope="session")
def tools_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway in front of a model that can be made to reason and to call tools."""
    folder = tmp_path_factory.mktemp("tools")
    model = write_thinking_model(folder / "model")
    options = {"model": str(model), "max_stop_strings": 40}
    write_model_repository(folder / "repository", MODEL, options, instances=1)
    with (
        start_server(folder / "repository") as server,
        running_gateway("--triton", server.grpc_url) as gateway,
    ):
        yield gateway


@pytest.fixture(scope="session")
def claude(tools_gateway: Gateway) -> Iterator[anthropic.Anthropic]:
    """The client of the Messages API."""
    import anthropic  # which takes a second, in the process that uses it

    url = f"http://{tools_gateway.address}"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def tools_api(tools_gateway: Gateway) -> Iterator[openai.OpenAI]:
    with tools_gateway.sdk() as api:
        yield api


@pytest.fixture(scope="session")
def api(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.sdk() as api:
        yield api

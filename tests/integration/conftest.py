"""Checks that each test leaves the server ready and its KV cache free."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from demo_server import Server


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test the server is ready and no block is in use."""
    yield
    if "server" in request.fixturenames:
        server: Server = request.getfixturevalue("server")
        assert server.is_ready()
        server.wait_for("kv_blocks_used", 0)
        assert server.metrics()["engine_up"] == 1

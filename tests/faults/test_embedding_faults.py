"""The engine dies while it makes embeddings."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from demo_server import Server
from paged_client import Client
from servers import LOAD_TIMEOUT_S, MODEL, engine_of, kill_engine, metrics, wait_for

pytestmark = pytest.mark.server


def test_open_embedding_requests_go_on_with_the_next_engine(embedder: Server) -> None:
    prompts = [[3 + index] * (5 + 150 * index) for index in range(12)]
    server = embedder.running
    restarts = metrics(server)["engine_restarts_total"]
    with Client(server.grpc_url, MODEL, timeout=LOAD_TIMEOUT_S) as client:
        before = [client.embed(prompt).vector for prompt in prompts]
        with ThreadPoolExecutor(len(prompts)) as pool:
            calls = [pool.submit(client.embed, prompt) for prompt in prompts]
            wait_for(lambda: metrics(server)["num_requests_waiting"] > 3, LOAD_TIMEOUT_S)
            engine_of(server).send_signal(signal.SIGSTOP)  # a prompt is computed in part
            assert not all(call.done() for call in calls)
            kill_engine(server)
            after = [call.result().vector for call in calls]
        wait_for(lambda: metrics(server)["engine_restarts_total"] == restarts + 1, LOAD_TIMEOUT_S)
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S)
    assert all((a == b).all() for a, b in zip(before, after, strict=True))

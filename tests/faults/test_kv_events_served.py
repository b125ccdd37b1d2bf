"""A router follows the cache of a served model, through the end of its engine."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import pytest
from kv_event_subscriber import Subscriber
from paged_client import Client
from servers import kill_engine, metrics, serve_demo, wait_for, wait_loaded

pytestmark = pytest.mark.server

BLOCK_SIZE = 16
PROMPT, SALTED, LATER = ([number + i % 7 for i in range(70)] for number in (300, 400, 500))


def num_known(subscriber: Subscriber, prompt: list[int]) -> int:
    """The number of blocks of a prompt that the subscriber knows."""
    found = {tuple(subscriber.cache.prefixes[name]) for name, _ in subscriber.cache.blocks}
    return sum(
        tuple(prompt[:end]) in found for end in range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
    )


def wait_for_prompt(subscriber: Subscriber, prompt: list[int]) -> None:
    deadline = time.monotonic() + 30
    while num_known(subscriber, prompt) < len(prompt) // BLOCK_SIZE:
        assert time.monotonic() < deadline
        subscriber.read(0.1)


def test_a_router_follows_the_cache_of_a_served_model(tmp_path: Path) -> None:
    folder = tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp")
    live, replay, snapshot = (
        f"ipc://{folder.name}/{name}" for name in ("live", "replay", "snapshot")
    )
    events = {
        "enable_kv_cache_events": True,
        "endpoint": live,
        "replay_endpoint": replay,
        "snapshot_endpoint": snapshot,
        "topic": "kv@pod@demo",
    }
    with (
        folder,
        serve_demo(tmp_path, kv_events_config=events) as server,
        Client(server.grpc_url, timeout=60) as client,
    ):
        subscriber = Subscriber(live, replay, snapshot, "kv@pod@demo", loss=0.1, seed=0)
        client.generate(SALTED, cache_salt="secret", max_tokens=40)
        client.generate(PROMPT, max_tokens=40)
        wait_for_prompt(subscriber, PROMPT)
        assert num_known(subscriber, SALTED) == 0
        # A router that knows the cache knows that the other half is the salted request's.
        assert len(subscriber.cache.blocks) * 2 == metrics(server)["kv_blocks_cached"]
        first_engine = subscriber.publisher
        kill_engine(server)
        wait_loaded(server, 1)
        client.generate(LATER, max_tokens=4)
        wait_for_prompt(subscriber, LATER)
        assert num_known(subscriber, PROMPT) == 0
        assert subscriber.publisher != first_engine
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, 30, "blocks are still in use")
        subscriber.close()

"""A stand-in of an endpoint picker, which knows servers by their metrics and KV events only."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from effort import ALL
from kv_event_subscriber import Subscriber
from metrics_page import read_metrics
from paged_client import Client

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server

pytestmark = pytest.mark.server

NUM_REQUESTS = int(os.environ.get("PICKED", "150"))  # 1000 for a longer run
NUM_SERVERS = 3 if ALL else 2
NUM_CONVERSATIONS = 40
BLOCK_SIZE = 16
PREFIX_BLOCKS = 8
# All servers together can hold all conversations, but none can alone.
NUM_BLOCKS = NUM_CONVERSATIONS * PREFIX_BLOCKS * 3 // 2 // NUM_SERVERS
BLOCK_BYTES = 98304  # 16 tokens of the demo model
TOPIC = "kv@pod@model"


@dataclass(frozen=True)
class Endpoint:
    """A server as a picker knows it, and a client for the requests."""

    subscriber: Subscriber
    metrics_url: str
    client: Client

    def num_cached_blocks(self, prompt: list[int]) -> int:
        """The number of a prompt's blocks that the server has, by its events."""
        self.subscriber.read(0)
        cache = self.subscriber.cache
        found = {tuple(cache.prefixes[block_hash]) for block_hash, _ in cache.blocks}
        ends = range(BLOCK_SIZE, len(prompt) + 1, BLOCK_SIZE)
        return next(
            (i for i, end in enumerate(ends) if tuple(prompt[:end]) not in found), len(ends)
        )

    @property
    def load(self) -> float:
        """The requests that wait or run, by its metrics."""
        page = read_metrics(self.metrics_url)
        return page["num_requests_waiting"] + page["num_requests_running"]


@pytest.fixture(scope="module")
def endpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Endpoint]]:
    with ExitStack() as stack:
        yield [start_endpoint(stack, tmp_path_factory.mktemp("server")) for _ in range(NUM_SERVERS)]


def start_endpoint(stack: ExitStack, folder: Path) -> Endpoint:
    sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="pb-", dir="/tmp"))
    live, replay, snapshot = (f"ipc://{sockets}/{name}" for name in ("live", "replay", "snapshot"))
    options = {
        "model": "demo",
        "kv_cache_memory_bytes": (NUM_BLOCKS + 1) * BLOCK_BYTES,
        "max_model_len": 512,
        "kv_events_config": {
            "enable_kv_cache_events": True,
            "endpoint": live,
            "replay_endpoint": replay,
            "snapshot_endpoint": snapshot,
            "topic": TOPIC,
        },
    }
    write_model_repository(folder, "paged_llm", options, instances=1)
    server = stack.enter_context(start_server(folder))
    subscriber = Subscriber(live, replay, snapshot, TOPIC, loss=0, seed=0)
    stack.callback(subscriber.close)
    client = stack.enter_context(Client(server.grpc_url, timeout=60))
    return Endpoint(subscriber, server.metrics_url, client)


def hit_rate(choose: Callable[[list[int]], Endpoint], first_token: int) -> float:
    """The fraction of all prompt tokens that were cached where they were sent."""
    draw = random.Random(first_token)
    length = PREFIX_BLOCKS * BLOCK_SIZE
    prefixes = [
        [first_token + draw.randrange(500) for _ in range(length)] for _ in range(NUM_CONVERSATIONS)
    ]
    num_tokens = num_cached = 0
    for _ in range(NUM_REQUESTS):
        prompt = [*draw.choice(prefixes), *(first_token + draw.randrange(500) for _ in range(6))]
        answer = choose(prompt).client.generate(prompt, max_tokens=1)
        num_tokens += answer.num_input_tokens
        num_cached += answer.num_cached_tokens
    return num_cached / num_tokens


@pytest.mark.thorough  # `faults/test_kv_events_served.py` follows the events of one server
def test_a_picker_that_reads_metrics_and_events_beats_chance(endpoints: list[Endpoint]) -> None:
    draw = random.Random(1)

    def best(prompt: list[int]) -> Endpoint:
        draw.shuffle(endpoints)
        return max(endpoints, key=lambda each: (each.num_cached_blocks(prompt), -each.load))

    by_chance = hit_rate(lambda prompt: draw.choice(endpoints), 300)
    picked = hit_rate(best, 900)
    print(f"{NUM_REQUESTS} requests: hit rate {picked:.2f}, by chance {by_chance:.2f}")
    assert picked > by_chance + 0.1

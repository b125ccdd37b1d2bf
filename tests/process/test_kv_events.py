"""A router that knows nothing but the published format knows what an engine's cache holds."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from kv_event_subscriber import Cache, Subscriber

from paged_backend.core.block_hash import DIGEST_SIZE
from paged_backend.core.cache_journal import CacheJournal, CacheState
from paged_backend.process.kv_events import publisher as publisher_module
from paged_backend.process.kv_events.events import BlockStored, events_of, short_hash
from paged_backend.process.kv_events.publisher import KVEventPublisher
from paged_backend.process.kv_events.queue import Changes, EventQueue, Lost
from paged_backend.process.kv_events.sender import MAX_WAITING
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.lora import LoRARequest
from paged_backend.values.options.kv_events import KVEventsConfig, is_bound
from paged_backend.values.windows import Chunks

ENGINE = Path(__file__).with_name("kv_event_engine.py")
STEPS = int(os.environ.get("KV_EVENT_STEPS", "200"))  # 10000 for a longer search
STEPS_PER_CHECK = 25
CATCH_UP_S = 10.0  # a heartbeat shows that the last message was lost


class EngineProcess:
    """An engine in another process, which can be killed and started again."""

    def __init__(self, config: dict[str, Any], windows: str) -> None:
        self._config, self._windows = json.dumps(config), windows
        self._seed = 0
        self.salted: set[int] = set()
        self._process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        self._seed += 1
        process = subprocess.Popen(
            [sys.executable, str(ENGINE), self._config, str(self._seed), self._windows],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    def step(self, number: int) -> dict[tuple[int, int], list[int]]:
        """Make steps; returns the blocks in the cache, by hash and group, with their tokens."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(f"{number}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        self.salted |= set(answer["salted"])
        return {(name, group): tokens for name, group, tokens in answer["cache"]}

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def kill_and_start(self) -> None:
        self.kill()
        self._process = self._start()


@pytest.fixture
def addresses(short_folder: Path) -> list[str]:
    """Three addresses that nobody else takes, not even while an engine is killed."""
    return [f"ipc://{short_folder}/{name}" for name in ("live", "replay", "snapshot")]


@pytest.fixture
def publisher(addresses: list[str]) -> Iterator[KVEventPublisher]:
    publisher = KVEventPublisher(config_of(addresses, buffer_steps=3))
    yield publisher
    publisher.close()


def options_of(addresses: list[str], **others: Any) -> dict[str, Any]:
    live, replay, snapshot = addresses
    return {
        "enable_kv_cache_events": True,
        "endpoint": live,
        "replay_endpoint": replay,
        "snapshot_endpoint": snapshot,
        "topic": "kv@pod@model",
    } | others


def config_of(addresses: list[str], **others: Any) -> KVEventsConfig:
    return KVEventsConfig.read(options_of(addresses, **others))


def catch_up(subscriber: Subscriber, wanted: dict[tuple[int, int], list[int]]) -> None:
    """Read until the subscriber's cache is the engine's."""
    deadline = time.monotonic() + CATCH_UP_S
    while subscriber.cache.blocks != wanted and time.monotonic() < deadline:
        subscriber.read(0.01)
    assert subscriber.cache.blocks == wanted


@pytest.mark.parametrize(
    "windows", ["one", "several", pytest.param("window", marks=pytest.mark.thorough)]
)
def test_a_subscriber_reproduces_the_cache(addresses: list[str], windows: str) -> None:
    """Through lost messages, replays, snapshots, kills, and another subscriber that never reads."""
    options = options_of(addresses, buffer_steps=10, hwm=10_000)
    engine = EngineProcess(options, windows)
    subscriber = Subscriber(*addresses, "kv@pod@model", loss=0.04, seed=1)
    idle = zmq.Context()
    never_reads = idle.socket(zmq.SUB)
    never_reads.setsockopt(zmq.RCVHWM, 1)
    never_reads.subscribe(b"")
    never_reads.connect(addresses[0])
    num_checks = STEPS // STEPS_PER_CHECK
    num_kills = num_blocks = 0
    try:
        for check in range(num_checks):
            wanted = engine.step(STEPS_PER_CHECK)
            num_blocks += len(wanted)
            catch_up(subscriber, wanted)
            if check % max(num_checks // 3, 1) == 1:
                engine.kill_and_start()
                num_kills += 1
    finally:
        engine.kill()
        subscriber.close()
        idle.destroy(linger=0)
    assert num_kills >= 2 and subscriber.num_lost and subscriber.num_replays
    assert subscriber.num_snapshots >= num_kills
    assert engine.salted and num_blocks
    assert not subscriber.seen & engine.salted
    print(
        f"{windows}: {num_checks * STEPS_PER_CHECK} steps, {num_kills} kills, "
        f"{subscriber.num_lost} lost, {subscriber.num_replays} replays, "
        f"{subscriber.num_snapshots} snapshots, {len(subscriber.seen)} blocks, "
        f"{len(engine.salted)} blocks with a salt of which 0 were announced"
    )


def journal_with(num_blocks: int, parent: bytes | None = None) -> CacheJournal:
    """A journal of one chain of blocks, which begins with `parent` if there is one."""
    journal = CacheJournal(KVCacheLayout(4, 16))
    for _ in range(num_blocks):
        block_hash = os.urandom(DIGEST_SIZE)
        journal.add(block_hash, parent, [1, 2, 3, 4], 0)
        parent = block_hash
    return journal


def test_vllms_names_for_the_attention_of_groups() -> None:
    layout = KVCacheLayout(4, 16, (None, 8, Chunks(8)))
    journal = CacheJournal(layout)
    for group in range(3):
        journal.add(os.urandom(DIGEST_SIZE), None, [1, 2, 3, 4], group)
    stored = [e for e in events_of(journal.take(), layout) if isinstance(e, BlockStored)]
    assert [(e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored] == [
        ("full_attention", None),
        ("sliding_window", 8),
        ("chunked_local_attention", None),
    ]


@pytest.fixture
def subscriber(addresses: list[str]) -> Iterator[Subscriber]:
    subscriber = Subscriber(*addresses, "kv@pod@model", loss=0, seed=0)
    yield subscriber
    subscriber.close()


def wait_for_seq(subscriber: Subscriber, seq: int) -> None:
    """Wait until the publisher has sent the batch of this number."""
    deadline = time.monotonic() + CATCH_UP_S
    while not any(number >= seq for number, _ in subscriber.ask_for_replay(seq)):
        assert time.monotonic() < deadline


def test_replays_of_what_is_not_there_are_empty(
    publisher: KVEventPublisher, subscriber: Subscriber
) -> None:
    for _ in range(5):
        publisher.publish(journal_with(1))
    wait_for_seq(subscriber, 5)
    # Of the first 6 batches, the last 3 are kept; heartbeats may have followed.
    first, *_ = subscriber.ask_for_replay(0)
    assert first[0] >= 3
    assert subscriber.ask_for_replay(10**6) == []
    assert subscriber.ask_for_replay(2**64 - 1) == []


@pytest.mark.parametrize(
    "frames", [[b"", b""], [b"", b"0"], [b"1"], [b"", b"x" * 9], [b"", b"", b""]]
)
def test_a_request_for_a_replay_that_is_none_gets_the_end_marker(
    publisher: KVEventPublisher, addresses: list[str], frames: list[bytes]
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(addresses[1])
        client.send_multipart(frames)
        assert client.poll(5000)
        assert client.recv_multipart() == [b"", b"", b"\xff" * 8, b""]


@pytest.mark.parametrize("address", [0, 1, 2], ids=["live", "replay", "snapshot"])
def test_a_subscriber_that_sends_too_much_is_disconnected(
    publisher: KVEventPublisher, subscriber: Subscriber, addresses: list[str], address: int
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER if address else zmq.XSUB) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.connect(addresses[address])
        client.send_multipart([b"", b"x" * 2**20])
        assert not client.poll(300)
    publisher.publish(journal_with(2))
    wait_for_seq(subscriber, 1)


def test_requests_of_a_subscriber_that_never_reads_do_not_delay_others(
    addresses: list[str], subscriber: Subscriber
) -> None:
    publisher = KVEventPublisher(config_of(addresses, buffer_steps=1000))
    for _ in range(1000):
        publisher.publish(journal_with(1))
    wait_for_seq(subscriber, 1000)
    context = zmq.Context()
    with context.socket(zmq.DEALER) as first, context.socket(zmq.DEALER) as second:
        for greedy, address, frames in (
            (first, addresses[1], [b"", bytes(8)]),
            (second, addresses[2], [b"snapshot"]),
        ):
            greedy.setsockopt(zmq.LINGER, 0)
            greedy.setsockopt(zmq.RCVHWM, 1)
            greedy.connect(address)
            for _ in range(100):
                greedy.send_multipart(frames)
        started_s = time.monotonic()
        publisher.publish(journal_with(1))
        wait_for_seq(subscriber, 1001)
        assert time.monotonic() - started_s < CATCH_UP_S / 2
    context.term()
    publisher.close()


def test_a_snapshot_that_nobody_can_make_now_is_refused(
    publisher: KVEventPublisher, addresses: list[str]
) -> None:
    """The engine's thread is in a long step, and many subscribers ask."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(addresses[2])
        for _ in range(MAX_WAITING + 2):
            client.send(b"snapshot")
        for _ in range(2):
            assert client.poll(5000)
            number, publisher_id = client.recv_multipart()
            assert (number, len(publisher_id)) == ((-2).to_bytes(8, "big", signed=True), 16)
        client.send(b"what?")
        assert client.poll(5000)
        assert client.recv_multipart()[0] == (-2).to_bytes(8, "big", signed=True)
        publisher.publish(journal_with(3))
        assert client.poll(5000)
        number, publisher_id, *chunks = client.recv_multipart()
        assert int.from_bytes(number, "big", signed=True) >= 1 and len(chunks) == 1


def test_snapshots_cost_a_twentieth_of_the_time_of_the_engine(
    publisher: KVEventPublisher, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A subscriber that never stops asking gets a copy of the state, and then waits."""
    journal = journal_with(3)
    now_s, copied_at = [1000.0], []

    def slow_state(journal: CacheJournal) -> CacheState:
        copied_at.append(now_s[0])
        now_s[0] += 0.125
        return CacheState(journal.layout, [], set())

    monkeypatch.setattr(CacheJournal, "state", slow_state)
    monkeypatch.setattr(publisher_module, "monotonic", lambda: now_s[0])
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(addresses[2])
        for _ in range(2):
            client.send(b"snapshot")
            while not client.poll(1):
                publisher.publish(journal)
                now_s[0] += 0.125
            client.recv_multipart()
    assert len(copied_at) == 2
    assert copied_at[1] - copied_at[0] >= 20 * 0.125


def test_a_snapshot_has_the_evicted_blocks_that_others_need(
    publisher: KVEventPublisher, subscriber: Subscriber
) -> None:
    journal = journal_with(3)
    first, second, third = journal._blocks
    journal.evict(first)
    publisher.publish(journal)
    wait_for_seq(subscriber, 1)
    cache = Cache()
    subscriber_thread = threading.Thread(
        target=lambda: [cache.apply(chunk) for chunk in subscriber.ask_for_snapshot()[2]]
    )
    subscriber_thread.start()
    while subscriber_thread.is_alive():
        publisher.publish(journal)
        time.sleep(0.01)
    assert set(cache.blocks) == {(short_hash(second), 0), (short_hash(third), 0)}
    assert cache.prefixes[short_hash(third)] == [1, 2, 3, 4] * 3
    for block_hash in (third, second):
        journal.evict(block_hash)
    assert journal.state() == CacheState(journal.layout, [], set())


def test_batches_that_wait_too_long_leave_a_gap() -> None:
    queue = EventQueue(max_items=2)
    journal = journal_with(1)
    changes = Changes(0.0, journal.take(), journal.layout)
    for _ in range(5):
        queue.add_changes(changes)
    assert queue.take() == [changes, changes]
    queue.add_changes(changes)
    assert queue.take() == [Lost(3), changes]


def test_without_snapshots_the_frames_are_those_of_earlier_versions(addresses: list[str]) -> None:
    publisher = KVEventPublisher(config_of(addresses, snapshot_endpoint=None))
    subscriber = Subscriber(addresses[0], addresses[1], None, "kv@pod@model", loss=0, seed=0)
    journal = journal_with(2)
    publisher.publish(journal)
    wait_for_seq(subscriber, 1)
    time.sleep(1.2)  # longer than between heartbeats, of which there are none
    assert [seq for seq, _ in subscriber.ask_for_replay(0)] == [0, 1]
    catch_up(subscriber, {})
    publisher.publish(journal_with(300, next(iter(journal._blocks))))
    deadline = time.monotonic() + CATCH_UP_S
    while len(subscriber.cache.blocks) != 302 and time.monotonic() < deadline:
        subscriber.read(0.01)
    assert len(subscriber.cache.blocks) == 302
    publisher.close()
    catch_up(subscriber, {})
    subscriber.close()


def test_a_collector_with_a_host_name_is_connected_to() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as collector:
        port = collector.bind_to_random_port("tcp://127.0.0.1")
        collector.subscribe(b"kv@")
        config = {"enable_kv_cache_events": True, "topic": "kv@pod@model"}
        publisher = KVEventPublisher(
            KVEventsConfig.read(config | {"endpoint": f"tcp://localhost:{port}"})
        )
        deadline = time.monotonic() + CATCH_UP_S
        payload = b""
        while b"BlockStored" not in payload:  # batches are lost until it is connected
            assert time.monotonic() < deadline
            publisher.publish(journal_with(1))
            if collector.poll(50):
                topic, number, payload = collector.recv_multipart()
                assert (topic, len(number)) == (b"kv@pod@model", 8)
        publisher.close()


def test_an_address_with_ipv6_is_bound() -> None:
    for address in ("tcp://[::1]:0", "tcp://*:0"):
        KVEventPublisher(KVEventsConfig(endpoint=address)).close()


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for name in ("endpoint", "replay_endpoint", "snapshot_endpoint"):
            options = {"endpoint": "tcp://127.0.0.1:0"} | {name: f"tcp://127.0.0.1:{port}"}
            with pytest.raises(ConfigError, match=f"kv_events_config.{name} cannot be used: Addr"):
                KVEventPublisher(KVEventsConfig.read(options))


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("endpoint", "127.0.0.1:5557", "must be tcp://HOST:PORT or ipc://PATH, got '127.0"),
        ("replay_endpoint", "tcp://*", "must be tcp://HOST:PORT"),
        ("endpoint", "udp://a:1", "must be tcp://HOST:PORT"),
        ("publisher", "kafka", "must be one of null, zmq or null, got 'kafka'"),
        ("buffer_steps", -1, "must be an integer from 0"),
        ("hwm", 0, "must be an integer from 1"),
        ("enable_kv_events", True, "is not known, did you mean enable_kv_cache_events?"),
    ],
)
def test_a_wrong_field_is_refused(field: str, value: object, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"option kv_events_config.{field} {problem}")):
        EngineConfig(kv_events_config={field: value})


def test_events_need_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="kv_events_config needs enable_prefix_caching"):
        EngineConfig(kv_events_config={"enable_kv_cache_events": True}, enable_prefix_caching=False)
    config = {"enable_kv_cache_events": True, "publisher": "null"}
    assert not EngineConfig(kv_events_config=config, enable_prefix_caching=False).kv_events().is_on


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://127.0.0.1:5557", True),
        ("tcp://[::]:5557", True),
        ("tcp://[::1]:5557", True),
        ("tcp://0.0.0.0:5557", True),
        ("ipc:///run/kv.sock", True),
        ("tcp://router.svc:5557", False),
        ("tcp://10.0.0.7:5557", False),
    ],
)
def test_which_addresses_are_bound(endpoint: str, binds: bool) -> None:
    assert KVEventsConfig(endpoint=endpoint) and is_bound(endpoint) == binds


def test_events_name_the_adapter_of_blocks():
    layout = KVCacheLayout(4, 16)
    journal = CacheJournal(layout)
    base, first, second = (bytes([number]) * DIGEST_SIZE for number in range(3))
    journal.add(base, None, [1, 2, 3, 4], 0)
    for block_hash, parent in ((first, None), (second, first)):
        journal.add(block_hash, parent, [1, 2, 3, 4], 0, LoRARequest("sql", 3, "/sql"))
    of_base, of_adapter = events_of(journal.take(), layout)
    assert (of_base.lora_id, of_base.lora_name, len(of_base.block_hashes)) == (None, None, 1)
    assert (of_adapter.lora_id, of_adapter.lora_name) == (3, "sql")
    assert of_adapter.block_hashes == [short_hash(first), short_hash(second)]

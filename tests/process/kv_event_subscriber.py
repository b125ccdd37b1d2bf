"""A subscriber of KV events, written from `docs/routing.md` only.

It imports nothing of ours, and decodes msgpack without any schema.
"""

from __future__ import annotations

import random
import time
from typing import Any

import msgspec
import zmq

Block = tuple[int, int]
"""The hash of a block and its KV cache group."""


class Cache:
    """What an engine can find, as far as events tell."""

    def __init__(self) -> None:
        self.blocks: dict[Block, list[int]] = {}
        self.prefixes: dict[int, list[int]] = {}  # all tokens up to the end of a block

    def apply(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            getattr(self, event["type"])(event)

    def BlockStored(self, event: dict[str, Any]) -> None:
        size, tokens, parent = event["block_size"], event["token_ids"], event["parent_block_hash"]
        assert len(tokens) == size * len(event["block_hashes"])
        assert event["medium"] == "GPU"
        assert (event["lora_id"] is None) == (event["lora_name"] is None)
        kind, window = event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
        assert kind == ("full_attention" if window is None else "sliding_window")
        for index, block_hash in enumerate(event["block_hashes"]):
            own = tokens[index * size : (index + 1) * size]
            self.blocks[block_hash, event["group_idx"]] = own
            if parent is None or parent in self.prefixes:
                self.prefixes[block_hash] = self.prefixes.get(parent, []) + own
            parent = block_hash

    def BlockRemoved(self, event: dict[str, Any]) -> None:
        assert event["medium"] == "GPU"
        for block_hash in event["block_hashes"]:
            del self.blocks[block_hash, event["group_idx"]]

    def AllBlocksCleared(self, event: dict[str, Any]) -> None:
        self.blocks.clear()
        self.prefixes.clear()


class Subscriber:
    """Follows one publisher, through gaps and through the ends of engines.

    Args:
        live: address of live events.
        replay: address of replays.
        snapshot: address of snapshots; None if the publisher has none.
        topic: topic of the events.
        loss: the fraction of live messages that are lost on purpose.
    """

    def __init__(
        self, live: str, replay: str, snapshot: str | None, topic: str, loss: float, seed: int
    ) -> None:
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(topic.encode())
        self._live.connect(live)
        self._replay, self._snapshot = replay, snapshot
        self._topic = topic.encode()
        self._loss, self._random = loss, random.Random(seed)
        self.cache = Cache()
        self.last_seq: int | None = None
        self.publisher: bytes | None = None
        self.num_lost = self.num_replays = self.num_snapshots = 0
        self.seen: set[int] = set()  # hashes of all blocks that were ever announced

    def read(self, seconds: float) -> None:
        """Follow live messages for a while."""
        end = time.monotonic() + seconds
        while self._live.poll(max(0, int(1000 * (end - time.monotonic())))):
            topic, number, payload = self._live.recv_multipart()
            assert topic == self._topic
            if self._random.random() < self._loss:
                self.num_lost += 1
            else:
                self._follow(int.from_bytes(number[:8], "big"), number[8:], payload)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _follow(self, seq: int, publisher: bytes, payload: bytes) -> None:
        if self._snapshot is None:
            if self.last_seq is None or seq < self.last_seq:  # another engine has started
                self.cache, self.last_seq = Cache(), -1
        elif publisher != self.publisher:
            self._install_snapshot()
            if publisher != self.publisher:
                return  # a message of an engine that has ended meanwhile
        assert self.last_seq is not None
        if seq > self.last_seq + 1:
            self._fill_gap(self.last_seq + 1)
        if seq == self.last_seq + 1:
            self._apply(seq, payload)

    def _apply(self, seq: int, payload: bytes) -> None:
        self.cache.apply(payload)
        self.last_seq = seq
        self.seen |= {block_hash for block_hash, _ in self.cache.blocks}

    def _fill_gap(self, start: int) -> None:
        self.num_replays += 1
        batches = self.ask_for_replay(start)
        if (not batches or batches[0][0] != start) and self._snapshot is not None:
            self._install_snapshot()
            return
        for seq, payload in batches:
            assert self.last_seq is not None and seq == self.last_seq + 1
            self._apply(seq, payload)

    def ask_for_replay(self, start: int) -> list[tuple[int, bytes]]:
        """The batches from a sequence number on, as far as they are kept."""
        socket = self._context.socket(zmq.DEALER)
        socket.connect(self._replay)
        socket.send_multipart([b"", start.to_bytes(8, "big")])
        batches = []
        while True:
            assert socket.poll(5000), "a replay did not end"
            empty, topic, number, payload = socket.recv_multipart()
            assert empty == b""
            if number == b"\xff" * 8:
                assert (topic, payload) == (b"", b"")
                break
            assert topic == self._topic
            batches.append((int.from_bytes(number[:8], "big"), payload))
        socket.close(linger=0)
        return batches

    def _install_snapshot(self) -> None:
        self.num_snapshots += 1
        seq, publisher, chunks = self.ask_for_snapshot()
        cache = Cache()
        for chunk in chunks:
            cache.apply(chunk)
        self.cache, self.last_seq, self.publisher = cache, seq, publisher

    def ask_for_snapshot(self) -> tuple[int, bytes, list[bytes]]:
        """The number of the last batch in a snapshot, the publisher's id, and its chunks."""
        assert self._snapshot is not None
        socket = self._context.socket(zmq.REQ)
        socket.connect(self._snapshot)
        socket.send(b"snapshot")
        assert socket.poll(5000), "no snapshot came"
        number, publisher, *chunks = socket.recv_multipart()
        socket.close(linger=0)
        return int.from_bytes(number, "big", signed=True), publisher, chunks

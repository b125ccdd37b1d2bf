"""An engine without a model that publishes KV events: `python kv_event_engine.py CONFIG SEED`.

Each line of its input is a number of steps to make, with random requests. The answer to each is a
JSON line: the blocks that can be found in its cache, and the hashes of requests with a salt.
"""

from __future__ import annotations

import json
import os
import random
import select
import sys

from engine_without_model import VOCAB, EngineWithoutModel, make_request

from paged_backend.core.block_hash import DIGEST_SIZE
from paged_backend.core.sequence import Sequence
from paged_backend.process.kv_events.events import short_hash
from paged_backend.process.kv_events.publisher import KVEventPublisher
from paged_backend.values.options.kv_events import KVEventsConfig

WINDOWS = {"one": (None,), "several": (None, 6), "window": (9,)}


class RandomEngine:
    """Makes steps with random requests, of which a third has a salt."""

    def __init__(self, config: KVEventsConfig, seed: int, windows: str) -> None:
        self._random = random.Random(seed)
        self._engine = EngineWithoutModel(
            num_blocks=40,
            windows=WINDOWS[windows],
            hash_key=os.urandom(DIGEST_SIZE),
            has_journal=True,
        )
        self._publisher = KVEventPublisher(config)
        self._salted: list[Sequence] = []
        self.salted_hashes: set[bytes] = set()
        self._num_requests = 0

    def make_steps(self, number: int) -> None:
        for _ in range(number):
            if self._random.random() < 0.4:
                self._add()
            if self._engine.has_unfinished:
                self._engine.step()
            for seq in self._salted:
                self.salted_hashes |= {key[:DIGEST_SIZE] for key in seq.block_hashes}
            self.publish()
        self._salted = [seq for seq in self._salted if not seq.is_finished]

    def publish(self) -> None:
        """What the engine's loop does between steps, and while it is idle."""
        journal = self._engine.scheduler.kv.journal
        assert journal is not None
        self._publisher.publish(journal)

    def _add(self) -> None:
        draw = self._random.randrange
        text, length = draw(3), draw(1, 30)
        prompt = [1 + (text * 7 + i) % (VOCAB - 1) for i in range(length)]
        prompt += [draw(1, VOCAB) for _ in range(draw(4))]
        name, salt = f"r{self._num_requests}", self._random.choice(["", "", "a"])
        self._num_requests += 1
        self._engine.add(
            make_request(name, prompt, n=draw(1, 3), max_tokens=draw(1, 20), salt=salt)
        )
        if salt:
            self._salted += self._engine.scheduler.sequences.of(name)

    def cache(self) -> list[tuple[int, int, list[int]]]:
        """Hash, group and tokens of each block that can be found, without those with a salt."""
        pool, found = self._engine.scheduler.kv.pool, []
        for key, block_id in pool._block_by_hash.items():
            block_hash, group = key[:DIGEST_SIZE], key[DIGEST_SIZE:]
            if block_hash not in self.salted_hashes:
                tokens = list(self._engine.content[block_id])
                found.append((short_hash(block_hash), group[0] if group else 0, tokens))
        return found


def main() -> None:
    config = KVEventsConfig.read(json.loads(sys.argv[1]))
    engine = RandomEngine(config, int(sys.argv[2]), sys.argv[3])
    print("ready", flush=True)
    while True:
        while not select.select([sys.stdin], [], [], 0.01)[0]:
            engine.publish()
        engine.make_steps(int(sys.stdin.readline()))
        salted = [short_hash(block_hash) for block_hash in engine.salted_hashes]
        print(json.dumps({"cache": engine.cache(), "salted": salted}), flush=True)


if __name__ == "__main__":
    main()

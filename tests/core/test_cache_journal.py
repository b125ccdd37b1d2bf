"""After any history, a journal's changes lead to what the prefix cache holds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace

from effort import examples
from engine_without_model import EngineWithoutModel, RandomDrafter, make_request, registered_hashes
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler_properties import MAX_MODEL_LEN, actions, windows

from paged_backend.core.block_hash import DIGEST_SIZE
from paged_backend.core.cache_journal import BlockAdded, CacheChange, CacheJournal, key_of
from paged_backend.values.kv_cache_groups import KVCacheLayout

HISTORIES = int(os.environ.get("HISTORIES", examples(60)))


class Follower:
    """The keys that can be found, from changes only."""

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.known: set[bytes] = set()

    def follow(self, changes: Iterable[CacheChange]) -> None:
        for change in changes:
            if isinstance(change, BlockAdded):
                block = change.block
                # A router knows the blocks before it, unless they were evicted meanwhile.
                assert not block.has_known_parent or block.parent_hash in self.known
                assert len(block.token_ids) == 4
                self.known.add(block.block_hash)
                key = key_of(block.block_hash, change.group)
                assert key not in self.keys
                self.keys.add(key)
            else:
                self.keys.remove(key_of(change.block_hash, change.group))


@settings(max_examples=HISTORIES, deadline=None)
@given(
    actions=actions,
    extra_blocks=st.integers(0, 30),
    windows=windows,
    async_scheduling=st.booleans(),
    is_drafted=st.booleans(),
    threshold=st.sampled_from([0, 0, 0.3, 0.8]),
)
def test_changes_lead_to_what_the_cache_holds(
    actions, extra_blocks, windows, async_scheduling, is_drafted, threshold
):
    engine = EngineWithoutModel(
        num_blocks=1 + KVCacheLayout(4, 16, windows).max_blocks(0, MAX_MODEL_LEN) + extra_blocks,
        max_num_seqs=4,
        max_model_len=MAX_MODEL_LEN,
        async_scheduling=async_scheduling and not is_drafted,
        drafter=RandomDrafter(1) if is_drafted else None,
        windows=windows,
        has_journal=True,
    )
    kv, follower, salted, num_added = engine.scheduler.kv, Follower(), [], 0
    journal = kv.journal
    assert journal is not None

    def check() -> None:
        follower.follow(journal.take())
        private = {key for seq in salted for key in seq.block_hashes}
        assert follower.keys == registered_hashes(kv.pool) - private
        state = journal.state()
        assert state.keys == follower.keys
        late = Follower()
        late.follow(state.changes_from_empty())
        assert late.keys == follower.keys

    for kind, value in actions:
        if kind == "add":
            name = f"r{num_added}"
            num_added += 1
            request = make_request(name, **value)
            engine.add(replace(request, cache_hit_threshold=threshold * (num_added % 2)))
            if request.is_private:
                salted += engine.scheduler.sequences.of(name)
        elif kind == "abort":
            engine.scheduler.cancel_request(f"r{value}")
        else:
            for _ in range(value):
                if engine.has_unfinished:
                    engine.step()
                    check()
    engine.run()
    check()
    # A pool that is used up holds nothing that could be found.
    kv.pool.release([kv.pool.allocate() for _ in range(kv.pool.num_free)])
    check()
    assert journal.state().blocks == [] and not follower.keys


def test_a_block_is_kept_as_long_as_a_block_after_it():
    journal = CacheJournal(KVCacheLayout(4, 16))
    one, two, three = (bytes([number]) * DIGEST_SIZE for number in range(3))
    for block_hash, parent in ((one, None), (two, one), (three, one)):
        journal.add(block_hash, parent, [1, 2, 3, 4], 0)
    journal.evict(one)
    journal.evict(two)
    assert [block.block_hash for block in journal.state().blocks] == [one, three]
    journal.evict(three)
    journal.evict(three)  # it is not there any more
    assert journal.state().blocks == []

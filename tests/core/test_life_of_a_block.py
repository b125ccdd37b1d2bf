"""The worked examples in docs/architecture.md, event by event."""

from __future__ import annotations

from engine_without_model import make_sequence

from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.core.sequence import Sequence
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams


def make(seq_id: int, tokens: list[int]) -> Sequence:
    return make_sequence(seq_id, Request(str(seq_id), tokens, SamplingParams()))


def compute(kv: KVCacheManager, seq: Sequence, new_tokens: list[int] = ()) -> None:  # type: ignore[assignment]
    """Start the sequence if it has no blocks, append tokens, and compute what is not computed."""
    if not seq.block_ids:
        kv.take_prefix(seq, kv.find_prefix(seq))
    seq.token_ids += new_tokens
    start, count = seq.num_computed_tokens, seq.num_uncomputed_tokens
    assert kv.allocate_slots(seq, count) == []
    kv.register_full_blocks(seq, start, start + count)
    seq.num_computed_tokens += count


def test_block_tables_and_free_list_of_the_windowed_example() -> None:
    kv = KVCacheManager(9, KVCacheLayout(4, 16, (None, 5)), enable_prefix_caching=True)

    def free() -> list[int]:
        return list(kv.pool._free)

    def tables(seq: Sequence) -> tuple[list[int], list[int]]:
        return seq.block_ids[::2], seq.block_ids[1::2]

    a = make(0, list(range(1, 10)))
    compute(kv, a)
    assert (*tables(a), free()) == ([1, 3, 5], [2, 4, 6], [7, 8])
    kv.free_invisible_blocks([a])
    compute(kv, a, [10])
    assert (*tables(a), free()) == ([1, 3, 5], [0, 4, 6], [7, 8, 2])
    kv.release(a)
    assert free() == [5, 6, 7, 8, 2, 4, 3, 1]
    b = make(1, [*range(1, 9), 50])
    compute(kv, b)
    assert (*tables(b), free()) == ([1, 3, 5], [0, 4, 6], [7, 8, 2])


def test_block_tables_and_free_list_of_the_worked_example() -> None:
    kv = KVCacheManager(6, KVCacheLayout(4, 16), enable_prefix_caching=True)

    def free() -> list[int]:
        return list(kv.pool._free)

    assert free() == [1, 2, 3, 4, 5]
    a = make(0, [1, 2, 3, 4, 5, 6])
    compute(kv, a)
    assert (a.block_ids, free()) == ([1, 2], [3, 4, 5])
    compute(kv, a, [7, 8])
    b = make(1, [1, 2, 3, 4, 9, 9])
    compute(kv, b)
    assert (b.block_ids, b.num_computed_tokens, free()) == ([1, 3], 6, [4, 5])
    kv.release(a)
    assert free() == [4, 5, 2]
    c = make(2, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    compute(kv, c)
    assert (c.block_ids, free()) == ([1, 2, 4], [5])
    compute(kv, b, [10, 11])
    compute(kv, c, [10, 11, 12])
    compute(kv, b, [12])
    c.token_ids.append(13)
    assert kv.allocate_slots(c, 1) is None
    kv.release(c)
    assert (b.block_ids, free()) == ([1, 3, 5], [4, 2])
    kv.release(b)
    assert free() == [5, 4, 2, 3, 1]
    compute(kv, c)
    assert (c.block_ids, free()) == ([1, 2, 4, 5], [3])

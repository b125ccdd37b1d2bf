"""Groups of layers, and what their block tables hold."""

from __future__ import annotations

from effort import examples
from engine_without_model import HASH_KEY, EngineWithoutModel, make_request, make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from paged_backend.core.block_pool import NULL_BLOCK
from paged_backend.core.kv_cache_manager import KVCacheManager
from paged_backend.values.kv_cache_groups import (
    MAX_GROUPS,
    KVCacheLayout,
    group_layers,
    group_layers_of_stage,
)
from paged_backend.values.windows import Chunks, Window, first_visible

some_windows = st.lists(
    st.one_of(st.none(), st.integers(1, 14), st.builds(Chunks, st.integers(1, 14))),
    min_size=1,
    max_size=3,
    unique=True,
).map(tuple)


def sizes(windows: list[int | None], max_model_len: int = 32768) -> list[tuple[int | None, int]]:
    return [(group.window, len(group.layers)) for group in group_layers(windows, max_model_len)]


def test_groups_of_well_known_models():
    assert sizes([None] * 32) == [(None, 32)]
    assert sizes([4096] * 32) == [(4096, 32)]  # Mistral-7B
    assert sizes([128, None] * 18) == [(128, 18), (None, 18)]  # gpt-oss-120b
    assert sizes(([4096] * 3 + [None]) * 8) == [*[(4096, 8)] * 3, (None, 8)]  # Olmo-3-7B
    chunks = Chunks(8192)  # Llama 4 Scout
    assert sizes(([chunks] * 3 + [None]) * 12) == [*[(chunks, 12)] * 3, (None, 12)]
    gemma_3_4b = [None if layer % 6 == 5 else 1024 for layer in range(34)]
    assert sizes(gemma_3_4b) == [*[(1024, 5)] * 5, (1024, 4), (None, 5)]


def test_a_window_as_long_as_the_longest_sequence_is_ignored():
    assert sizes([4096, None], max_model_len=4096) == [(None, 2)]
    assert sizes([Chunks(4096), None], max_model_len=4096) == [(None, 2)]
    assert sizes([Chunks(64), 64, None]) == [(Chunks(64), 1), (64, 1), (None, 1)]


def test_rare_kinds_do_not_make_many_groups():
    assert sizes([64] * 30 + [None]) == [*[(64, 5)] * 6, (None, 1)]


@given(
    st.lists(st.sampled_from([None, 8, 100, 3000]), min_size=1, max_size=40),
    st.integers(1, 4000),
)
def test_groups_hold_each_layer_once(windows, max_model_len):
    groups = group_layers(windows, max_model_len)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    assert len(groups) <= MAX_GROUPS
    for group in groups:
        for layer in group.layers:
            window = windows[layer]
            limit = None if window is None or window >= max_model_len else window
            assert limit == group.window


@given(
    st.lists(st.sampled_from([None, 8, 100]), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 200),
)
def test_all_stages_have_the_groups_of_the_model(windows, num_stages, max_model_len):
    whole = group_layers(windows, max_model_len)
    borders = [len(windows) * stage // num_stages for stage in range(num_stages + 1)]
    found = [[] for _ in whole]
    for layers in map(range, borders, borders[1:]):
        groups = group_layers_of_stage(windows, max_model_len, layers)
        assert [group.window for group in groups] == [group.window for group in whole]
        for place, group in enumerate(groups):
            assert set(group.layers) <= set(layers)
            found[place] += group.layers
        for window in {group.window for group in groups}:
            sizes = [len(group.layers) for group in groups if group.window == window]
            assert max(sizes) == -(-sum(sizes) // len(sizes))
    assert sorted(layer for layers in found for layer in layers) == list(range(len(windows)))


@settings(max_examples=examples(100), deadline=None)
@given(
    block_size=st.sampled_from([1, 2, 4, 8]),
    window=st.one_of(st.integers(1, 20), st.builds(Chunks, st.integers(1, 20))),
    budget=st.integers(1, 20),
    computed=st.integers(0, 30),
    new=st.integers(1, 60),
)
def test_the_maximum_of_blocks_is_reached_but_never_exceeded(
    block_size, window, budget, computed, new
):
    """Against each step that can occur: any start, any number of tokens."""
    layout = KVCacheLayout(block_size, budget, (window,))
    end = computed + new

    def held(first: int, last: int) -> int:
        """The blocks of the tokens that a step computes or sees."""
        return len({place // block_size for place in range(first_visible(first, window), last)})

    found = max(
        held(first, last)
        for first in range(computed, end)
        for last in range(first + 1, min(first + budget, end) + 1)
    )
    most = layout.max_blocks(computed, end)
    assert found <= most <= found + 1
    if isinstance(window, Chunks):
        assert layout.blocks_of_decode(end) <= -(-(window.size + block_size - 1) // block_size)
        if window.size % block_size == 0 and new >= budget + window.size:
            assert found == most
    elif new >= budget + block_size and computed >= window - 1:
        assert found == most
    assert KVCacheLayout(block_size, budget, (None, window)).max_blocks(computed, end) == most + (
        -(-end // block_size)
    )


def test_a_window_of_an_eighth_holds_less_than_a_third():
    """A context of 4,096 tokens; 12 layers with a window of 512 and as many without one."""
    windows = tuple(group.window for group in group_layers([512, None] * 12, 8192))
    assert windows == (512, None)
    engine = EngineWithoutModel(
        num_blocks=600,
        block_size=16,
        max_num_batched_tokens=512,
        max_model_len=8192,
        windows=windows,
    )
    engine.add(make_request("long", [7] * 4096, max_tokens=20, ignore_eos=True))
    most = [0, 0]
    while engine.has_unfinished:
        engine.step()
        for seq in engine.scheduler.sequences.running.values():
            for group in range(2):
                held = sum(block_id != NULL_BLOCK for block_id in seq.block_ids[group::2])
                most[group] = max(most[group], held)
            assert engine.scheduler.stats().num_used_blocks == sum(map(bool, seq.block_ids))
    assert most[1] == -(-4115 // 16)
    assert most[0] <= 0.3 * most[1]
    assert len(engine.tokens["long", 0]) == 20


def test_a_prompt_longer_than_the_pool_runs_in_chunks():
    layout = KVCacheLayout(4, 8, (10,))
    num_blocks = 1 + layout.max_blocks(0, 400)
    assert num_blocks == 6
    engine = EngineWithoutModel(
        num_blocks=num_blocks, max_num_batched_tokens=8, max_model_len=400, windows=(10,)
    )
    for name in "ab":
        engine.add(make_request(name, [ord(name) % 50] * 300, max_tokens=20, ignore_eos=True))
    engine.run()
    assert {len(tokens) for tokens in engine.tokens.values()} == {20}


def test_slots_and_the_view_count_what_is_held():
    engine = EngineWithoutModel(max_num_batched_tokens=16, windows=(None, 6))
    engine.add(make_request("a", [3] * 14, max_tokens=9, ignore_eos=True))
    for _ in range(3):
        engine.step()
    # 16 tokens; the next one, at position 16, sees 11 to 16: 3 blocks of 4 were freed, or 2.
    stats, (view,) = engine.scheduler.stats(), engine.scheduler.view().sequences
    assert stats.num_used_blocks == len(view.block_ids) == 4 + 2
    assert stats.num_used_slots == 16 + 8
    assert stats.utilization == 1


def test_a_fork_copies_a_partial_block_of_each_group_or_takes_no_step() -> None:
    """With too little room for all copies, nothing changes."""
    kv = KVCacheManager(7, KVCacheLayout(4, 16, (None, 8)), enable_prefix_caching=False)
    parent, child = (make_sequence(index, make_request("a", [3] * 6)) for index in range(2))
    assert kv.allocate_slots(parent, 6) == []
    parent.num_computed_tokens = 6
    kv.fork(parent, child)
    held = list(child.block_ids)
    taken = kv.pool.allocate()
    assert kv.pool.num_free == 1
    assert kv.allocate_slots(child, 1) is None
    assert (child.block_ids, kv.pool.num_free) == (held, 1)
    kv.pool.release([taken])
    copies = kv.allocate_slots(child, 1)
    assert copies is not None and [source for source, _ in copies] == held[2:]
    assert child.block_ids == [*held[:2], *(target for _, target in copies)]
    kv.check_invariants([parent, child])


def hits_of_model(
    cached: list[set[int]], windows: tuple[Window | None, ...], block_size: int, most: int
) -> int:
    """The longest hit in blocks, by trying each length; `cached` has block indices by group."""
    for length in range(most, 0, -1):
        seen_from = [
            0 if window is None else first_visible(length * block_size, window)
            for window in windows
        ]
        needed = (range(first // block_size, length) for first in seen_from)
        if all(set(need) <= have for need, have in zip(needed, cached, strict=True)):
            return length
    return 0


@settings(max_examples=examples(150), deadline=None)
@given(
    windows=some_windows,
    length=st.integers(2, 40),
    evicted=st.integers(0, 40),
    budget=st.integers(1, 20),
    order=st.randoms(use_true_random=False),
)
def test_prefix_hits_equal_a_simple_model(windows, length, evicted, budget, order):
    block_size, num_groups = 4, len(windows)
    layout = KVCacheLayout(block_size, budget, windows)
    kv = KVCacheManager(200, layout, enable_prefix_caching=True, hash_key=HASH_KEY)
    request = make_request("a", range(1, length + 1))
    first = make_sequence(0, request)
    names: dict[int, tuple[int, int]] = {}  # block id -> index of the block and group
    while first.num_uncomputed_tokens:
        kv.free_invisible_blocks([first])
        start = first.num_computed_tokens
        count = min(order.randint(1, budget), first.num_uncomputed_tokens)
        assert kv.allocate_slots(first, count) == []
        kv.register_full_blocks(first, start, start + count)
        for place, block_id in enumerate(first.block_ids):
            if block_id != NULL_BLOCK:
                names[block_id] = divmod(place, num_groups)
        first.num_computed_tokens += count
        kv.check_invariants([first])
        assert sum(map(bool, first.block_ids)) <= layout.max_blocks(start, length)
    kv.release(first)
    assert kv.pool.num_used == 0
    for _ in range(kv.pool.num_free - kv.pool.num_cached + min(evicted, kv.pool.num_cached)):
        kv.pool.allocate()
    cached: list[set[int]] = [set() for _ in windows]
    for block_id in kv.pool.cached_block_ids():
        index, group = names[block_id]
        cached[group].add(index)

    second = make_sequence(1, request)
    hits = kv.find_prefix(second)
    wanted = hits_of_model(cached, windows, block_size, (length - 1) // block_size)
    assert kv.num_hit_tokens(hits) == wanted * block_size
    for place, block_id in enumerate(hits):
        index, group = divmod(place, num_groups)
        window = windows[group]
        first = 0 if window is None else first_visible(wanted * block_size, window)
        if (index + 1) * block_size <= first:
            assert block_id == NULL_BLOCK
        else:
            assert names[block_id] == (index, group)
    kv.take_prefix(second, hits)


def test_a_token_sees_its_own_chunk_only():
    chunks = Chunks(8)
    assert [first_visible(position, chunks) for position in (0, 7, 8, 15, 16)] == [0, 0, 8, 8, 16]
    assert str(chunks) == "chunks of 8"


def test_blocks_of_a_chunk_are_freed_together():
    """Groups without a window and with chunks of 10 tokens, in blocks of 4."""
    layout = KVCacheLayout(4, 1, (None, Chunks(10)))
    kv = KVCacheManager(40, layout, enable_prefix_caching=True, hash_key=HASH_KEY)
    seq = make_sequence(0, make_request("a", range(1, 31)))
    held = []
    for position in range(30):
        kv.free_invisible_blocks([seq])
        assert kv.allocate_slots(seq, 1) == []
        seq.num_computed_tokens += 1
        kv.check_invariants([seq])
        held.append([index for index, block in enumerate(seq.block_ids[1::2]) if block])
        assert held[-1][0] == position // 10 * 10 // 4
    assert held[9] == [0, 1, 2]
    assert held[10] == [2]  # tokens 8 and 9 of the first chunk share it with those after them
    assert held[29] == [5, 6, 7]


def test_a_hit_at_the_start_of_a_chunk_needs_no_block_of_the_one_before():
    layout = KVCacheLayout(4, 64, (None, Chunks(8)))
    kv = KVCacheManager(40, layout, enable_prefix_caching=True, hash_key=HASH_KEY)
    first = make_sequence(0, make_request("a", range(1, 31)))
    kv.allocate_slots(first, 30)
    kv.register_full_blocks(first, 0, 30)
    first.num_computed_tokens = 30
    in_chunks = first.block_ids[1::2]
    kv.pool.release(in_chunks[:4])  # as if they were out of sight
    first.block_ids[1:9:2] = [NULL_BLOCK] * 4
    while any(block in kv.pool.cached_block_ids() for block in in_chunks[:4]):
        kv.pool.allocate()
    hits = {}
    for length in (9, 13, 17, 21):  # the last token is computed again
        sequence = make_sequence(length, make_request(str(length), range(1, length + 1)))
        hits[length] = kv.num_hit_tokens(kv.find_prefix(sequence))
    assert hits == {9: 8, 13: 8, 17: 16, 21: 20}

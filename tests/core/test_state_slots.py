"""Slots for states: after any history, each step reads the state of exactly its own tokens."""

from __future__ import annotations

import pytest
from engine_without_model import (
    EngineWithoutModel,
    PrecomputedDrafter,
    RandomDrafter,
    WorkerDrafter,
    expected_tokens,
    make_request,
    make_sequence,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler_properties import HISTORIES, MAX_MODEL_LEN, actions, windows

from paged_backend.core.seeds import derive_seed
from paged_backend.core.sequence import Sequence
from paged_backend.core.state_slots import StateSlots
from paged_backend.values.kv_cache_groups import KVCacheLayout, StateChunks, StateLayout

PROMPT = [1 + token % 40 for token in range(26)]


def make_engine(
    num_slots: int = 24, interval: int = 8, chunks: StateChunks | None = None, **options
) -> EngineWithoutModel:
    return EngineWithoutModel(states=StateLayout(num_slots, interval, chunks), **options)


@settings(max_examples=HISTORIES, deadline=None)
@given(
    actions=actions,
    extra_blocks=st.integers(0, 30),
    windows=windows,
    num_slots=st.sampled_from([3, 4, 6, 9, 40]),
    interval=st.sampled_from([0, 4, 8, 12]),
    budget=st.integers(4, 48),
    caching=st.booleans(),
    async_scheduling=st.booleans(),
    fair=st.booleans(),
    drafts=st.none() | st.integers(0, 1000),
    chunked=st.booleans(),
)
def test_states_are_of_the_right_tokens_after_any_history(
    actions,
    extra_blocks,
    windows,
    num_slots,
    interval,
    budget,
    caching,
    async_scheduling,
    fair,
    drafts,
    chunked,
):
    """With drafts, these are right up to any position; no step divides a chunk of 4 tokens."""
    # A chunk beside 4 decodes and as many drafts.
    chunks = StateChunks(4, 2) if chunked and budget >= 12 else None
    num_blocks = 1 + KVCacheLayout(4, budget, windows).max_blocks(0, MAX_MODEL_LEN) + extra_blocks
    engine = make_engine(
        num_slots,
        interval,
        chunks,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        enable_prefix_caching=caching,
        async_scheduling=async_scheduling,
        fair=fair,
        windows=windows,
        drafter=None if drafts is None else [RandomDrafter, WorkerDrafter][drafts % 2](drafts),
    )
    accepted, aborted = {}, set()
    for kind, value in actions:
        if kind == "add":
            name = f"r{len(accepted)}"
            accepted[name] = make_request(name, **value)
            engine.add(accepted[name])
        elif kind == "abort":
            engine.scheduler.cancel_request(f"r{value}")
            aborted.add(f"r{value}")
        else:
            for _ in range(value):
                if engine.has_unfinished:
                    engine.step()
    engine.run()
    assert engine.scheduler.kv.pool.num_used == 0
    assert engine.scheduler.kv.states.pool.num_used == 0
    for name, request in accepted.items():
        for index in range(request.params.n):
            want = expected_tokens(request, derive_seed(request.params.seed, index), MAX_MODEL_LEN)
            got = engine.tokens.get((name, index), [])
            assert got == want if name not in aborted else got == want[: len(got)]


def hits_of_a_second_request(engine: EngineWithoutModel, prompt: list[int]) -> int:
    engine.add(make_request("second", prompt, max_tokens=1))
    (output,) = [output for output in engine.step() or engine.step() if output.new_token_ids]
    return output.num_cached_tokens


def test_chunks_end_at_checkpoints_and_later_requests_start_there() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    engine.add(make_request("first", PROMPT, max_tokens=1))
    engine.run()
    lengths = [len(item.token_ids) for plan in engine.plans for item in plan.scheduled]
    assert lengths == [8, 8, 8, 2]  # 24 is the border of the last full block, too
    engine.plans.clear()
    engine.add(make_request("second", [*PROMPT[:19], 7, 7, 7], max_tokens=1))
    engine.run()
    # 4 blocks of 4 tokens are equal, and the state after 16 tokens is cached.
    assert engine.plans[0].scheduled[0].start == 16


def slices_of(engine: EngineWithoutModel) -> list[tuple[int, int]]:
    """The first token, and the token after the last one, of each slice of all steps."""
    return [
        (item.start, item.start + len(item.token_ids))
        for plan in engine.plans
        for item in plan.scheduled
    ]


def test_slices_of_a_prompt_end_between_chunks() -> None:
    """Whatever room other sequences leave."""
    engine = make_engine(interval=0, chunks=StateChunks(8, 2), max_num_batched_tokens=22)
    for name in "abc":
        engine.add(make_request(name, [3, 2, 1], max_tokens=9, ignore_eos=True))
    engine.step()
    engine.add(make_request("long", PROMPT, max_tokens=1))
    engine.run()
    assert [part for part in slices_of(engine) if part[1] > 12] == [(0, 16), (16, 26)]


def test_the_border_of_a_prompt_lies_between_chunks() -> None:
    engine = make_engine(interval=1000, chunks=StateChunks(8, 2), max_num_batched_tokens=64)
    engine.add(make_request("first", PROMPT[:22], max_tokens=1))
    engine.run()
    assert slices_of(engine) == [(0, 16), (16, 22)]  # not at the last full block, after 20
    seq = make_sequence(7, make_request("second", PROMPT))
    assert engine.scheduler.kv.num_hit_tokens(engine.scheduler.kv.find_prefix(seq)) == 16


def test_a_slice_without_room_for_a_chunk_waits() -> None:
    engine = make_engine(interval=0, chunks=StateChunks(8, 2), max_num_batched_tokens=12)
    for name in "ab":
        engine.add(make_request(name, PROMPT, max_tokens=1))
    engine.step()
    assert slices_of(engine) == [(0, 8)]  # 4 tokens of the second one would divide its chunk
    engine.run()


def test_drafts_are_as_few_as_are_computed_one_by_one() -> None:
    chunks = StateChunks(8, 3)
    engine = make_engine(chunks=chunks, drafter=PrecomputedDrafter(6, 6), max_num_batched_tokens=64)
    request = make_request("first", [1, 2, 3], max_tokens=20, ignore_eos=True)
    engine.add(request)
    engine.run()
    assert engine.tokens["first", 0] == expected_tokens(request, derive_seed(1, 0), 64)
    assert max(plan.scheduled[0].num_draft_tokens for plan in engine.plans) == 2


def test_a_hit_ends_at_the_border_of_a_prompt() -> None:
    engine = make_engine(interval=1000, max_num_batched_tokens=64)
    engine.add(make_request("first", PROMPT, max_tokens=6))
    engine.run()
    engine.plans.clear()
    engine.add(make_request("second", [*PROMPT, 7, 7], max_tokens=1))
    engine.run()
    assert engine.plans[0].scheduled[0].start == 24


def test_a_prompt_keeps_the_state_where_it_leaves_an_earlier_one() -> None:
    """So the third prompt with the same 5 blocks starts after them."""
    engine = make_engine(interval=1000, max_num_batched_tokens=64)
    slices = []
    for place, token in enumerate((7, 8, 9)):
        engine.plans.clear()
        prompt = [*PROMPT[:20], *[token] * 8]
        engine.add(make_request(f"r{place}", prompt, max_tokens=1))
        engine.run()
        slices.append(slices_of(engine))
    assert slices == [
        [(0, 24), (24, 28)],
        [(0, 20), (20, 24), (24, 28)],
        [(20, 24), (24, 28)],
    ]


def test_no_state_is_kept_where_chunks_would_be_divided() -> None:
    engine = make_engine(interval=1000, chunks=StateChunks(8, 2), max_num_batched_tokens=64)
    for token in (7, 8, 9):
        engine.plans.clear()
        prompt = [*PROMPT[:20], *[token] * 16]
        engine.add(make_request(f"r{token}", prompt, max_tokens=1))
        engine.run()
    assert slices_of(engine) == [(16, 32), (32, 36)]


def test_a_hit_needs_the_state_and_the_blocks() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    engine.add(make_request("first", PROMPT, max_tokens=1))
    engine.run()
    seq = make_sequence(7, make_request("second", PROMPT))
    states, kv = engine.scheduler.kv.states, engine.scheduler.kv
    assert kv.num_hit_tokens(kv.find_prefix(seq)) == 24
    taken = [states.pool.allocate() for _ in range(states.pool.num_free)]  # evicts all states
    assert kv.find_prefix(seq) == []
    states.pool.release(taken)


def test_decodes_keep_checkpoints_and_overwrite_other_states() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    engine.add(make_request("first", [1, 2, 3], max_tokens=12, ignore_eos=True))
    engine.run()
    slots = [plan.state_slots[0] for plan in engine.plans]
    replaced = [start for start, (read, write) in enumerate(slots) if read != write]
    # The prompt's 3 tokens, then one token a step: the state after 8 tokens is kept.
    assert replaced == [0, 6]
    tokens = [1, 2, 3, *engine.tokens["first", 0]]
    seq = make_sequence(7, make_request("second", tokens))
    assert engine.scheduler.kv.num_hit_tokens(engine.scheduler.kv.find_prefix(seq)) == 8


def test_no_checkpoints_without_a_prefix_cache() -> None:
    engine = make_engine(enable_prefix_caching=False, max_num_batched_tokens=64)
    engine.add(make_request("first", PROMPT, max_tokens=3))
    engine.run()
    assert [len(item.token_ids) for item in engine.plans[0].scheduled] == [26]
    assert engine.scheduler.kv.states.pool.num_cached == 0


def test_few_slots_bound_the_sequences_that_run() -> None:
    engine = make_engine(num_slots=5, max_num_seqs=8)
    for name in "abc":
        engine.add(make_request(name, PROMPT, max_tokens=9, ignore_eos=True))
    most = 0
    while engine.has_unfinished:
        engine.step()
        most = max(most, len(engine.scheduler.sequences.started))
    assert most == 2
    assert {len(tokens) for tokens in engine.tokens.values()} == {9}


@pytest.mark.parametrize("caching", [True, False])
def test_a_pool_without_a_free_slot_gives_up_checkpoints(caching: bool) -> None:
    key_of = (lambda seq, position: bytes([position])) if caching else None
    states = StateSlots(StateLayout(3, 4), 4, key_of)
    seq = make_sequence(1, make_request("a", PROMPT))
    states.num_started = 1
    pairs = []
    for _ in range(6):
        pairs.append(states.advance(seq, 4))
        seq.num_computed_tokens += 4
    writes = [write for _, write in pairs]
    assert [read for read, _ in pairs] == [0, *writes[:-1]]
    states.check_invariants([seq])
    states.release(seq)
    assert states.pool.num_used == 0


@pytest.mark.parametrize("num_right", range(5))
def test_drafts_keep_the_state_before_them(num_right: int) -> None:
    """Drafts are rejected at each position, or not at all."""
    engine = make_engine(drafter=PrecomputedDrafter(4, num_right), max_num_batched_tokens=64)
    request = make_request("first", [1, 2, 3], max_tokens=20, ignore_eos=True)
    engine.add(request)
    engine.run()
    tokens = engine.tokens["first", 0]
    assert tokens == expected_tokens(request, derive_seed(1, 0), 64)
    drafted = [plan for plan in engine.plans if plan.scheduled[0].num_draft_tokens]
    assert drafted and all(read != write for p in drafted for read, write in p.state_slots)
    # A checkpoint is kept after each 8 tokens, although drafts reach beyond it.
    seq = make_sequence(7, make_request("second", [1, 2, 3, *tokens]))
    assert engine.scheduler.kv.num_hit_tokens(engine.scheduler.kv.find_prefix(seq)) == 16
    # Each wrong draft takes one step more, but each step has a token.
    assert len(engine.plans) <= 20


@pytest.mark.parametrize("num_slots", range(3, 8))
def test_drafts_take_no_slot_that_another_sequence_needs(num_slots: int) -> None:
    """With five slots, two sequences run that are too many for drafts in all of their steps."""
    engine = make_engine(num_slots, drafter=PrecomputedDrafter(4, 2), max_num_seqs=8)
    request = make_request("first", PROMPT, n=2, max_tokens=9, ignore_eos=True)
    engine.add(request)
    engine.run()
    for index in range(2):
        seed = derive_seed(request.params.seed, index)
        assert engine.tokens["first", index] == expected_tokens(request, seed, 64)
    pairs = [plan.scheduled for plan in engine.plans if len(plan.scheduled) == 2]
    drafted = [item.num_draft_tokens > 0 for pair in pairs for item in pair]
    assert (bool(pairs), any(drafted)) == (num_slots > 4, num_slots > 4)
    assert any(not any(item.num_draft_tokens for item in pair) for pair in pairs) or num_slots < 5


def test_drafts_may_take_all_slots_that_are_free() -> None:
    states = StateSlots(StateLayout(5, 4), 4, None)
    states.num_started = 2
    taken = [states.pool.allocate() for _ in range(2)]
    assert states.has_room_for_drafts
    taken.append(states.pool.allocate())
    assert not states.has_room_for_drafts
    states.pool.release(taken)


def test_a_checkpoint_is_given_up_for_a_sequence_that_needs_a_slot() -> None:
    """Two sequences that share a state must not write over it."""
    states = StateSlots(StateLayout(5, 4), 4, lambda seq, position: bytes([seq.seq_id, position]))
    kept, parent, child = (make_sequence(index, make_request("a", PROMPT)) for index in range(3))
    states.num_started = 3
    for seq in (kept, parent):
        states.advance(seq, 4)
        seq.num_computed_tokens = 4
    child.num_computed_tokens = 4
    states.fork(parent, child)
    assert states.pool.num_free == 2
    pairs = [states.advance(seq, 4) for seq in (kept, parent, child)]
    assert [read == write for read, write in pairs] == [True, False, False]
    assert len({write for _, write in pairs}) == 3


def test_a_step_that_may_be_repeated_leaves_the_state_before_it() -> None:
    """The steps of a sequence with a grammar may, if there are free slots."""
    states = StateSlots(StateLayout(9, 4), 4, None)
    seq = make_sequence(1, make_request("a", PROMPT))
    states.num_started = 1
    states.advance(seq, 3)
    seq.num_computed_tokens = 3
    for grammar, is_kept in ((None, False), (object(), True)):
        seq.grammar = grammar
        read, write = states.advance(seq, 2)
        assert (read != write) == is_kept
        seq.num_computed_tokens += 2
    assert [state.position for state in seq.states] == [5, 7]
    seq.num_computed_tokens = 5  # the step is repeated
    assert states.rewind(seq)
    assert [state.position for state in seq.states] == [5]
    assert seq.num_computed_tokens == 5
    seq.num_computed_tokens = 4
    assert not states.rewind(seq)
    assert states.pool.num_used == 0


@pytest.mark.parametrize(("num_tokens", "start"), [(23, 20), (24, 20), (25, 24)])
def test_the_same_prompt_again_starts_at_its_last_full_block(num_tokens: int, start: int) -> None:
    """Its last token is computed again, so that a block that ends with it is not used."""
    engine = make_engine(interval=1000, max_num_batched_tokens=64)
    for name in ("first", "second"):
        engine.plans.clear()
        engine.add(make_request(name, PROMPT[:num_tokens], max_tokens=1))
        engine.run()
    assert engine.plans[0].scheduled[0].start == start


def test_the_last_state_of_a_sequence_can_be_a_checkpoint() -> None:
    engine = make_engine(max_num_batched_tokens=64)
    engine.add(make_request("first", PROMPT[:24], max_tokens=1))
    engine.run()
    engine.plans.clear()
    engine.add(make_request("second", [*PROMPT[:24], 7, 7], max_tokens=1))
    engine.run()
    assert engine.plans[0].scheduled[0].start == 24


@pytest.mark.parametrize("mutant", ["no rewind", "the wrong position", "overwritten"])
def test_a_wrong_state_after_drafts_is_noticed(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative controls of the tests with drafts."""

    def keep_position(states: StateSlots, seq: Sequence) -> bool:
        position = seq.num_computed_tokens
        rewound(states, seq)
        seq.num_computed_tokens = position
        return True

    def overwrite(states: StateSlots, seq: Sequence, num_tokens: int, **options) -> tuple[int, int]:
        read, write = advanced(states, seq, num_tokens, **options)
        return (write, write) if options.get("has_drafts") else (read, write)

    rewound, advanced = StateSlots.rewind, StateSlots.advance
    if mutant == "overwritten":
        monkeypatch.setattr(StateSlots, "advance", overwrite)
    else:
        other = keep_position if mutant == "the wrong position" else (lambda *args: True)
        monkeypatch.setattr(StateSlots, "rewind", other)
    engine = make_engine(drafter=PrecomputedDrafter(4, 2))
    engine.add(make_request("first", PROMPT, max_tokens=20, ignore_eos=True))
    with pytest.raises((AssertionError, RuntimeError, KeyError), match="state|^[0-9]+$"):
        engine.run()

"""After any history the books are right and every token is what it would have been alone."""

from __future__ import annotations

import os
from dataclasses import replace

from effort import examples
from engine_without_model import (
    VOCAB,
    AheadDrafter,
    EngineWithoutModel,
    PrecomputedDrafter,
    RandomDrafter,
    SchedulerOfSlices,
    TogetherDrafter,
    WorkerDrafter,
    expected_tokens,
    make_request,
    registered_hashes,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged_backend.core.drafter import Draft
from paged_backend.core.scheduler import Scheduler
from paged_backend.core.seeds import derive_seed
from paged_backend.core.sequence import PLACEHOLDER
from paged_backend.speculation.lookup import LookupDrafter
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.options.speculation import SpeculativeConfig
from paged_backend.values.outputs import DraftCounts, SequenceOutput
from paged_backend.values.windows import Chunks

MAX_MODEL_LEN = 40
HISTORIES = int(os.environ.get("HISTORIES", examples(120)))  # more for a longer search

# Prompts are cut from few long texts, so that prefixes are shared at full and partial blocks.
prompts = st.builds(
    lambda text, length, tail: [1 + (text * 7 + i) % (VOCAB - 1) for i in range(length)] + tail,
    st.integers(0, 2),
    st.integers(1, 30),
    st.lists(st.integers(1, VOCAB - 1), max_size=3),
)
requests = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "n": st.sampled_from([1, 1, 1, 2, 3]),
        "max_tokens": st.integers(1, 20),
        "ignore_eos": st.booleans(),
        "salt": st.sampled_from(["", "", "a"]),
        "seed": st.integers(0, 3),
        "priority": st.sampled_from([0, 0, 0, -1, 1]),
        "tenant": st.sampled_from(["", "a", "b"]),
        "prompt_logprobs": st.sampled_from([None, None, None, 0]),
    }
)
drafters = st.one_of(
    st.just(lambda: None),
    st.builds(
        lambda length, num_right: lambda: PrecomputedDrafter(length, num_right),
        st.integers(1, 12),
        st.sampled_from([0, 1, 6, 12]),
    ),
    st.integers(0, 9).map(lambda seed: lambda: RandomDrafter(seed)),
    st.integers(0, 9).map(lambda seed: lambda: AheadDrafter(seed)),
    st.integers(0, 9).map(lambda seed: lambda: WorkerDrafter(seed)),
    st.integers(0, 9).map(lambda seed: lambda: TogetherDrafter(seed)),
    # Requests with equal prompts and seeds have equal answers, which it finds.
    st.builds(
        lambda method, number, draws_ahead: (
            lambda: LookupDrafter(
                SpeculativeConfig(
                    method=method, num_speculative_tokens=number, prompt_lookup_max=2
                ),
                draws_ahead,
            )
        ),
        st.sampled_from(["ngram", "suffix"]),
        st.integers(1, 8),
        st.booleans(),
    ),
)
windows = st.sampled_from(
    [
        *[(None,), (None,), (5,), (1,), (None, 6), (9, None, 9), (2, 11), (None, 3, 8), (None, 39)],
        *[(Chunks(6),), (None, Chunks(8)), (Chunks(5), None, 9)],
    ]
)
actions = st.lists(
    st.one_of(
        requests.map(lambda r: ("add", r)),
        st.integers(1, 6).map(lambda k: ("step", k)),
        st.integers(0, 30).map(lambda k: ("abort", k)),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=HISTORIES, deadline=None)
@given(
    actions=actions,
    extra_blocks=st.integers(0, 30),
    windows=windows,
    budget=st.integers(4, 48),
    chunked=st.booleans(),
    caching=st.booleans(),
    async_scheduling=st.booleans(),
    fair=st.booleans(),
    make_drafter=drafters,
)
def test_block_counts_and_tokens_are_right_after_any_history(
    actions, extra_blocks, windows, budget, chunked, caching, async_scheduling, fair, make_drafter
):
    budget = budget if chunked else max(budget, MAX_MODEL_LEN)
    # The smallest pool holds one longest sequence.
    num_blocks = 1 + KVCacheLayout(4, budget, windows).max_blocks(0, MAX_MODEL_LEN) + extra_blocks
    engine = EngineWithoutModel(
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
        max_model_len=MAX_MODEL_LEN,
        enable_chunked_prefill=chunked,
        enable_prefix_caching=caching,
        async_scheduling=async_scheduling,
        fair=fair,
        tenant_weights={"b": 3},
        drafter=make_drafter(),
        windows=windows,
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
            engine.scheduler.check_invariants()
        else:
            for _ in range(value):
                if engine.has_unfinished:
                    engine.step()
    engine.run()

    assert engine.scheduler.kv.pool.num_used == 0
    assert engine.scheduler.kv.pool.num_free == num_blocks - 1
    for name, request in accepted.items():
        if request.params.prompt_logprobs is not None and (name, 0) in engine.tokens:
            assert engine.prompt_logprobs.pop(name) == request.prompt_token_ids[1:]
        for index in range(request.params.n):
            want = expected_tokens(request, derive_seed(request.params.seed, index), MAX_MODEL_LEN)
            got = engine.tokens.get((name, index), [])
            assert got == want if name not in aborted else got == want[: len(got)]
    assert not engine.prompt_logprobs


def _added(
    tenant: str, prompt: list[int], max_tokens: int, n: int = 1, salt: str = "", priority: int = 0
) -> tuple[str, object]:
    fields = {"prompt": prompt, "max_tokens": max_tokens, "n": n, "salt": salt, "seed": 0}
    fields |= {"ignore_eos": False, "priority": priority, "tenant": tenant, "prompt_logprobs": None}
    return "add", fields


# Two sequences end in one step that began to decode in another order than they were admitted in.
ENDS_IN_ANOTHER_ORDER = [
    _added("a", [1], 12),
    _added("a", [*range(1, 29)], 6),
    ("step", 2),
    _added("", [*range(1, 26), 1, 1, 2], 7, salt="a"),
    _added("", [*range(1, 8)], 7, n=2),
    _added("b", [*range(8, 17), 1, 1, 1], 9, n=3),
    _added("b", [1], 1, n=2),
]

# Two tenants have received the same service, one of them with a weight of 3.
EQUAL_SERVICE = [
    _added("b", [8, 9, 10, 40], 11, n=2),
    ("step", 4),
    _added("", [1], 1),
    _added("", [1], 1, priority=1),
    ("step", 1),
    _added("", [*range(1, 22)], 1),
    _added("b", [15, 16, 17, 18], 1),
]


@settings(max_examples=HISTORIES, deadline=None)
@given(
    actions=actions,
    extra_blocks=st.integers(0, 60),
    windows=windows,
    budget=st.integers(4, 48),
    async_scheduling=st.booleans(),
)
@example(ENDS_IN_ANOTHER_ORDER, 35, (None, 6), 11, False)
@example(EQUAL_SERVICE, 0, (None,), 4, False)
def test_continued_decodes_are_the_steps_of_slices(
    actions, extra_blocks, windows, budget, async_scheduling
):
    """Step by step: the outputs, the blocks in use, the prefix cache and the counters."""
    layout = KVCacheLayout(4, budget, windows)
    engines = [
        EngineWithoutModel(
            num_blocks=1 + layout.max_blocks(0, MAX_MODEL_LEN) + extra_blocks,
            max_num_seqs=6,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            async_scheduling=async_scheduling,
            tenant_weights={"b": 3},
            windows=windows,
            scheduler_type=scheduler_type,
        )
        for scheduler_type in (Scheduler, SchedulerOfSlices)
    ]
    num_added = 0
    for kind, value in [*actions, ("step", 10_000)]:
        if kind == "add":
            for engine in engines:
                engine.add(make_request(f"r{num_added}", **value))
            num_added += 1
        elif kind == "abort":
            for engine in engines:
                engine.scheduler.cancel_request(f"r{value}")
        else:
            for _ in range(value):
                if not engines[0].has_unfinished:
                    break
                outputs, wanted = (engine.step() for engine in engines)
                assert sorted(map(_comparable, outputs)) == sorted(map(_comparable, wanted))
                pools = [engine.scheduler.kv.pool for engine in engines]
                assert pools[0].num_used == pools[1].num_used
                assert registered_hashes(pools[0]) == registered_hashes(pools[1])
    stats, wanted_stats = (engine.scheduler.stats() for engine in engines)
    for name in ("num_steps", "num_preemptions", "num_generation_tokens", "num_cache_hits"):
        assert getattr(stats, name) == getattr(wanted_stats, name), name


def _comparable(output: SequenceOutput) -> tuple[object, ...]:
    key = (output.request_id, output.index, output.new_token_ids)
    return (*key, output.finish_reason or "", output.num_cached_tokens)


@settings(max_examples=examples(100), deadline=None)
@given(prompt=prompts, other_salt=st.booleans())
def test_a_repeated_prompt_hits_unless_the_salt_differs(prompt, other_salt):
    engine = EngineWithoutModel(max_model_len=MAX_MODEL_LEN)
    engine.add(make_request("a", prompt, max_tokens=1))
    engine.run()
    engine.add(make_request("b", prompt, max_tokens=1, salt="x" if other_salt else ""))
    engine.run()
    hits = engine.scheduler.stats().num_cache_hits
    assert hits == (0 if other_salt else (len(prompt) - 1) // 4 * 4)


@settings(max_examples=examples(100), deadline=None)
@given(
    wanted=st.lists(requests, min_size=1, max_size=8),
    budget=st.integers(4, 48),
    async_scheduling=st.booleans(),
    make_drafter=drafters,
)
def test_neither_drafts_nor_steps_ahead_change_counts_or_the_prefix_cache(
    wanted, budget, async_scheduling, make_drafter
):
    """In a pool with room for everything, so that nothing is evicted or preempted."""

    def run(drafter, async_scheduling):
        engine = EngineWithoutModel(
            num_blocks=400,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            async_scheduling=async_scheduling,
            drafter=drafter,
        )
        # One after the other: what a request finds in the cache depends on those beside it.
        for number, fields in enumerate(wanted):
            engine.add(make_request(f"r{number}", **fields))
            engine.run()
        return engine

    plain, drafted = run(None, False), run(make_drafter(), async_scheduling)
    assert (drafted.tokens, drafted.reasons) == (plain.tokens, plain.reasons)
    pool, plain_pool = drafted.scheduler.kv.pool, plain.scheduler.kv.pool
    assert registered_hashes(pool) == registered_hashes(plain_pool)
    stats, plain_stats = drafted.scheduler.stats(), plain.scheduler.stats()
    for name in ("num_prompt_tokens", "num_generation_tokens", "num_cache_hits", "finished"):
        assert getattr(stats, name) == getattr(plain_stats, name), name
    assert async_scheduling or stats.num_steps <= plain_stats.num_steps


def test_right_drafts_save_steps_and_wrong_ones_cost_none():
    def num_steps(drafter):
        engine = EngineWithoutModel(drafter=drafter)
        engine.add(make_request("r", range(1, 9), max_tokens=25, ignore_eos=True))
        engine.run()
        return engine.scheduler.stats().num_steps

    assert num_steps(None) == num_steps(PrecomputedDrafter(4, 0)) == 25
    assert num_steps(PrecomputedDrafter(4, 4)) == 1 + 5  # 5 tokens each
    assert num_steps(PrecomputedDrafter(4, 1)) == 1 + 12  # 2 tokens each


def test_decodes_with_drafts_stay_in_one_step():
    """Also those that begin while a step with the drafts of others is in flight."""

    class All(PrecomputedDrafter):
        waits_together = True

        def awaits(self, sequences):
            return {seq.seq_id for seq in sequences}

    engine = EngineWithoutModel(drafter=All(2, 1), async_scheduling=True)
    for name in "abcd":
        engine.add(make_request(name, [5, 6, ord(name)], max_tokens=40, ignore_eos=True))
        for _ in range(3):
            engine.step()
    engine.run()
    sizes = [len(plan.scheduled) for plan in engine.plans]
    assert sizes.count(4) > 15 and len(sizes) < 30


def test_a_decode_goes_on_before_the_blocks_of_wrong_drafts():
    """A long wrong draft leaves blocks behind, into which the next tokens must not be written."""

    class Once(PrecomputedDrafter):
        def propose(self, sequences, budget):
            return {} if self.num_proposed else super().propose(sequences, budget)

    for windows in [(None,), (None, 5)]:
        engine = EngineWithoutModel(drafter=Once(9, 0), windows=windows)
        request = make_request("r", range(1, 7), max_tokens=25, ignore_eos=True)
        engine.add(request)
        engine.run()
        assert engine.tokens["r", 0] == expected_tokens(request, derive_seed(1, 0), 64)


def test_drafts_leave_room_for_prompts():
    """A sequence with more drafts than a step has room for runs, and another one arrives."""
    engine = EngineWithoutModel(max_num_batched_tokens=16, drafter=PrecomputedDrafter(20, 0))
    engine.add(make_request("a", range(1, 9), max_tokens=40, ignore_eos=True))
    engine.step()
    engine.step()
    engine.add(make_request("b", range(1, 20), max_tokens=1, salt="b"))
    for _ in range(3):
        engine.step()
    assert ("b", 0) in engine.reasons


def test_right_drafts_after_the_end_do_not_count():
    """All drafts are right, and an end token is one of them."""
    engine = EngineWithoutModel(drafter=PrecomputedDrafter(9, 9))
    request = make_request("r", range(1, 9), max_tokens=50)
    engine.add(replace(request, params=replace(request.params, stop_token_ids=tuple(range(9)))))
    engine.run()
    stats = engine.scheduler.stats()
    assert engine.reasons["r", 0] == "stop"
    assert len(engine.tokens["r", 0]) == stats.num_generation_tokens
    # The first token is not a draft, and neither is the one after a step with right drafts only.
    assert stats.num_accepted_tokens == len(engine.tokens["r", 0]) - 1 < 9


def test_the_worker_gets_a_reference_once_and_again_after_a_preemption():
    class Steady(AheadDrafter):
        def propose(self, sequences, budget):
            ahead = [seq.seq_id for seq in sequences if seq.num_output_placeholders]
            self.references |= {seq_id: [7] for seq_id in ahead if seq_id not in self.references}
            return {
                seq_id: Draft([PLACEHOLDER], reference=self.references[seq_id]) for seq_id in ahead
            }

    engine = EngineWithoutModel(drafter=Steady(0), async_scheduling=True)
    engine.add(make_request("r", range(1, 9), max_tokens=40, ignore_eos=True))
    for _ in range(8):
        engine.step()
    (seq,) = engine.scheduler.sequences.running.values()
    engine.scheduler.sequences.preempt(seq)
    engine.run()
    items = [item for plan in engine.plans for item in plan.scheduled]
    assert sum(bool(item.reference_token_ids) for item in items) == 2
    assert sum(item.draws_drafts for item in items) > 10


def test_a_draft_that_finds_no_blocks_preempts_nobody():
    """Each of two sequences has room for its next token, and for no more."""
    engine = EngineWithoutModel(num_blocks=5, max_model_len=8, drafter=PrecomputedDrafter(6, 6))
    for name in "ab":
        engine.add(make_request(name, range(1, 6), max_tokens=3, ignore_eos=True, salt=name))
    engine.run()
    assert engine.scheduler.stats().num_preemptions == 0
    assert all(len(tokens) == 3 for tokens in engine.tokens.values())


@settings(max_examples=examples(50), deadline=None)
@given(
    wanted=st.lists(requests, min_size=1, max_size=6),
    async_scheduling=st.booleans(),
    make_drafter=drafters,
)
def test_the_drafts_of_all_outputs_are_those_of_the_engine(wanted, async_scheduling, make_drafter):
    engine = EngineWithoutModel(
        max_model_len=MAX_MODEL_LEN, async_scheduling=async_scheduling, drafter=make_drafter()
    )
    for number, fields in enumerate(wanted):
        engine.add(make_request(f"r{number}", **fields))
    found = DraftCounts()
    while engine.has_unfinished:
        for output in engine.step():
            found = found.plus(output.drafts or DraftCounts())
    stats = engine.scheduler.stats()
    assert found == DraftCounts(stats.num_draft_tokens, stats.num_accepted_tokens)


def test_each_output_counts_the_drafts_of_its_step():
    class Predicting(PrecomputedDrafter):
        def propose(self, sequences, budget):
            drafts = super().propose(sequences, budget)
            return {
                seq.seq_id: Draft(drafts[seq.seq_id].token_ids, seq.request.request_id == "b")
                for seq in sequences
            }

    engine = EngineWithoutModel(drafter=Predicting(4, 3))
    for name in "ab":
        engine.add(make_request(name, range(1, 6), max_tokens=10, ignore_eos=True, salt=name))
    counts = {"a": [], "b": []}
    while engine.has_unfinished:
        for output in engine.step():
            counts[output.request_id].append(output.drafts)
    # 1, 4, 4 and 1 tokens: the last one has no draft, since nothing could follow it.
    assert counts["a"] == [None, DraftCounts(4, 3), DraftCounts(4, 3), None]
    assert counts["b"] == [None, DraftCounts(4, 3, 4, 3), DraftCounts(4, 3, 4, 3), None]

"""Constrained sequences: after any history they have the tokens that each would get alone."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest
from effort import examples
from engine_without_model import (
    EOS,
    VOCAB,
    AheadDrafter,
    CalmLexer,
    EngineWithoutModel,
    PrecomputedDrafter,
    RandomDrafter,
    RandomLexer,
    SchedulerOfSlices,
    ToyGrammar,
    WorkerDrafter,
    expected_tokens,
    make_request,
    mask_of,
    registered_hashes,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_scheduler_properties import HISTORIES, MAX_MODEL_LEN, drafters, requests

from paged_backend.core.grammar import SharedLexer
from paged_backend.core.grammar_budget import StepTime
from paged_backend.core.scheduler import Scheduler
from paged_backend.core.seeds import derive_seed
from paged_backend.core.step_results import MAX_FORCED_TOKENS
from paged_backend.values.kv_cache_groups import StateLayout
from paged_backend.values.request import Request

wanted = st.lists(st.tuples(requests, st.booleans()), min_size=1, max_size=8)


def grammars(
    request: Request, progress: list[list[int] | None], lexer: SharedLexer | None = None
) -> dict[int, ToyGrammar]:
    """A grammar for each open completion; they share a lexer."""
    lexer, tokens = lexer or CalmLexer(), progress or [[]] * request.params.n
    return {
        index: ToyGrammar(request.params.ignore_eos, lexer=lexer)
        for index, part in enumerate(tokens)
        if part is not None
    }


def confirm(request: Request, constrained: bool, tokens: dict[tuple[str, int], list[int]]) -> None:
    for index in range(request.params.n):
        seed = derive_seed(request.params.seed, index)
        grammar = ToyGrammar(request.params.ignore_eos) if constrained else None
        expected = expected_tokens(request, seed, MAX_MODEL_LEN, grammar)
        assert tokens[request.request_id, index] == expected


def plain(prompt: list[int], n: int = 1, max_tokens: int = 1) -> dict[str, object]:
    return {"prompt": prompt, "n": n, "max_tokens": max_tokens, "seed": 0}


@settings(max_examples=examples(100), deadline=None)
@example(  # a sequence is preempted while a step with its drafts is in flight
    wanted=[
        (plain([1]), False),
        (plain([1], max_tokens=3), False),
        (plain([*range(1, 19), 1, 1], n=2, max_tokens=14), True),
        (plain([*range(1, 17), 1, 1, 1], n=2, max_tokens=7), False),
        (plain([*range(1, 7), 1, 1, 1], max_tokens=5), False),
        (plain([1]), False),
    ],
    lives=[6, 5],
    num_blocks=17,
    async_scheduling=True,
    caching=False,
    make_drafter=lambda: RandomDrafter(0),
    delays=None,
    states=None,
)
@example(  # a sequence with forced tokens still has the blocks of wrong drafts
    wanted=[(plain([*range(1, 30), 1, 1, 2], n=2, max_tokens=6), True)],
    lives=[],
    num_blocks=11,
    async_scheduling=False,
    caching=True,
    make_drafter=lambda: PrecomputedDrafter(4, 0),
    delays=None,
    states=None,
)
@given(
    wanted=wanted,
    lives=st.lists(st.integers(0, 12), max_size=3),  # steps until the engine dies
    num_blocks=st.integers(11, 40),
    async_scheduling=st.booleans(),
    caching=st.booleans(),
    make_drafter=drafters,
    delays=st.none() | st.integers(0, 99),
    states=st.sampled_from([None, StateLayout(5, 8), StateLayout(30, 4)]),
)
def test_tokens_under_a_grammar_depend_on_nothing_else(
    wanted, lives, num_blocks, async_scheduling, caching, make_drafter, delays, states
):
    """Not on other sequences, preemption, forced tokens, drafts, delays, or engines' deaths."""
    open_requests = {
        f"r{number}": (make_request(f"r{number}", **fields), constrained)
        for number, (fields, constrained) in enumerate(wanted)
    }
    tokens: dict[tuple[str, int], list[int]] = {}
    ended: set[tuple[str, int]] = set()
    everything = list(open_requests.values())
    for num_steps in [*lives, 2000]:
        engine = EngineWithoutModel(
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            async_scheduling=async_scheduling,
            drafter=make_drafter(),
            states=states,
        )
        for request, constrained in open_requests.values():
            keys = [(request.request_id, index) for index in range(request.params.n)]
            progress = [None if key in ended else tokens.get(key, []) for key in keys]
            lexer = None if delays is None else RandomLexer(delays)
            of_completions = grammars(request, progress, lexer) if constrained else None
            engine.scheduler.add_request(request, 1, progress, of_completions)
        for _ in range(num_steps):
            if not engine.has_unfinished:
                break
            for out in engine.step():
                tokens.setdefault((out.request_id, out.index), []).extend(out.new_token_ids)
                if out.finish_reason is not None:
                    ended.add((out.request_id, out.index))
        open_requests = {
            name: (request, constrained)
            for name, (request, constrained) in open_requests.items()
            if any((name, index) not in ended for index in range(request.params.n))
        }
    assert not open_requests
    for request, constrained in everything:
        confirm(request, constrained, tokens)


def test_masks_follow_the_drafts_that_the_device_draws():
    """Some drafts are right, others are wrong, and others are forbidden."""
    num_masked = 0
    for seed in range(20):
        engine = EngineWithoutModel(async_scheduling=True, drafter=AheadDrafter(seed))
        request = make_request("r", [4, 9], n=2, max_tokens=20, seed=seed)
        engine.scheduler.add_request(request, 1, (), grammars(request, []))
        engine.run()
        confirm(request, True, engine.tokens)
        items = [item for plan in engine.plans for item in plan.scheduled]
        num_masked += sum(item.draws_drafts and item.max_move > 0 for item in items)
    assert num_masked > 20  # drafts that follow drafts in flight


def test_a_draft_model_guesses_only_after_known_tokens_under_a_grammar():
    """A step begins with known tokens if the worker draws drafts for a sequence with a grammar."""
    for seed in range(20):
        engine = EngineWithoutModel(async_scheduling=True, drafter=WorkerDrafter(seed))
        for name in "ab":
            request = make_request(name, [4, 9], n=2, max_tokens=20, seed=seed)
            constrained = grammars(request, []) if name == "a" else None
            engine.scheduler.add_request(request, 1, (), constrained)
        engine.run()
        assert engine.num_drawn > 10


def test_forced_tokens_are_computed_in_one_step():
    request = make_request("r", [4], max_tokens=12, ignore_eos=True)
    engine = EngineWithoutModel(max_num_batched_tokens=64)
    engine.scheduler.add_request(request, 1, (), grammars(request, []))
    engine.run()
    confirm(request, True, engine.tokens)
    stats = engine.scheduler.stats()
    assert stats.num_forced_tokens > 0
    assert stats.num_generation_tokens == 12
    # Each step samples one token; the forced ones are computed with it.
    assert stats.num_steps + stats.num_forced_tokens <= 12 + 1


class CountingScheduler(Scheduler):
    """Counts the decodes that steps continue."""

    num_continued = 0

    def schedule(self):
        output = super().schedule()
        self.num_continued += len(output.continued.new_token_ids)
        return output


def _wanted(prompt, max_tokens, **fields):
    others = {"n": 1, "ignore_eos": False, "salt": "", "seed": 0, "priority": 0, "tenant": ""}
    request = {"prompt": prompt, "max_tokens": max_tokens, "prompt_logprobs": None}
    return others | request | fields, False


# A sequence of the previous step's decodes gets a slice beside decodes that are continued.
ONE_IS_NOT_CONTINUED = [
    _wanted([*range(1, 25)], 15, n=3, priority=-1),
    _wanted([*range(8, 27), 1], 10, n=2, priority=-1, tenant="a"),
    _wanted([1, 2, 3, 1, 1], 9),
    _wanted([1], 5, n=2),
]


@settings(max_examples=HISTORIES, deadline=None)
@given(wanted=wanted, num_blocks=st.integers(17, 60), async_scheduling=st.booleans())
@example(ONE_IS_NOT_CONTINUED, 31, True)
def test_continued_decodes_are_the_steps_of_slices(wanted, num_blocks, async_scheduling):
    """Step by step: the outputs, the blocks in use and the prefix cache."""
    engines = [
        EngineWithoutModel(
            num_blocks=num_blocks,
            max_num_seqs=6,
            max_model_len=MAX_MODEL_LEN,
            async_scheduling=async_scheduling,
            scheduler_type=scheduler_type,
        )
        for scheduler_type in (Scheduler, SchedulerOfSlices)
    ]
    for number, (fields, constrained) in enumerate(wanted):
        request = make_request(f"r{number}", **fields)
        for engine in engines:
            of_completions = grammars(request, []) if constrained else None
            engine.scheduler.add_request(request, 1, (), of_completions)
    while engines[0].has_unfinished:
        outputs, expected = (
            sorted((out.request_id, out.index, out.new_token_ids) for out in engine.step())
            for engine in engines
        )
        assert outputs == expected
        pools = [engine.scheduler.kv.pool for engine in engines]
        assert pools[0].num_used == pools[1].num_used
        assert registered_hashes(pools[0]) == registered_hashes(pools[1])
    assert not engines[1].has_unfinished


def test_constrained_decodes_are_continued_where_no_token_is_forced():
    request = make_request("r", [4], max_tokens=12, ignore_eos=True)
    engine = EngineWithoutModel(max_num_batched_tokens=64, scheduler_type=CountingScheduler)
    engine.scheduler.add_request(request, 1, (), grammars(request, []))
    engine.run()
    confirm(request, True, engine.tokens)
    stats = engine.scheduler.stats()
    num_not_continued = stats.num_steps - engine.scheduler.num_continued
    # The prompt, and each step after forced tokens, which is followed by a step with a slice again.
    assert 0 < engine.scheduler.num_continued
    assert num_not_continued <= 1 + 2 * stats.num_forced_tokens


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_no_step_verifies_a_draft_after_a_forbidden_one(async_scheduling: bool) -> None:
    engine = EngineWithoutModel(
        drafter=PrecomputedDrafter(6, 3), async_scheduling=async_scheduling, max_model_len=64
    )
    numbers = []
    launched = engine.scheduler.schedule

    def schedule():
        output = launched()
        if output.num_sequences:
            step = engine.scheduler._in_flight[-1]
            for seq in step.sampled:
                if seq.seq_id in step.drafts:
                    drafts = step.drafts[seq.seq_id].token_ids
                    grammar = seq.grammar._grammar
                    assert len(grammar.masks_along(drafts)) == len(drafts) + 1
                    numbers.append(len(drafts))
        return output

    engine.scheduler.schedule = schedule
    for index in range(6):
        request = make_request(f"r{index}", [index + 1] * 5, max_tokens=20, seed=index)
        engine.scheduler.add_request(request, 1, grammars=grammars(request, []))
    while engine.scheduler.has_unfinished:
        engine.step()
    assert 0 < min(numbers) < max(numbers)


class Busy(ToyGrammar):
    """Takes 20 ms of processor time for each mask."""

    def allows(self, token_id: int) -> bool:
        return False

    def masks_along(self, draft_token_ids: Iterable[int], first: int = 0) -> list[bytes]:
        end_s = time.thread_time() + 0.02
        while time.thread_time() < end_s:
            pass
        return super().masks_along(draft_token_ids, first)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_sequences_of_a_slow_grammar_let_others_run_in_their_places(async_scheduling):
    """And their request ends, with all of its completions, when it has taken too much time."""
    engine = EngineWithoutModel(
        max_num_seqs=8, async_scheduling=async_scheduling, grammar_time=StepTime()
    )
    slow = make_request("slow", [4], n=8, max_tokens=50, ignore_eos=True)
    lexer = SharedLexer()
    engine.scheduler.add_request(slow, 1, (), {i: Busy(True, lexer=lexer) for i in range(8)})
    for number in range(3):
        engine.add(make_request(f"fast{number}", [4], n=4, max_tokens=30, ignore_eos=True))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    ends = [(out.request_id, out.finish_reason, out.problem) for out in outputs]
    ends = [end for end in ends if end[1] is not None]
    assert sorted(end[:2] for end in ends[:12]) == [(f"fast{i // 4}", "length") for i in range(12)]
    ((_, reason, problem),) = set(ends[12:])
    assert (len(ends), reason) == (20, "error")
    assert problem.startswith("structured_outputs: the grammar takes too much time: over 1.")
    engine.scheduler.check_empty()


class Refusing:
    """Refuses the fifth token, although its masks allow every token."""

    is_stuck = False
    problem = ""

    def __init__(self) -> None:
        self.lexer = CalmLexer()
        self.num_tokens = 0

    def accept(self, token_ids: list[int]) -> bool:
        if self.num_tokens == 4:
            return False
        self.num_tokens += len(token_ids)
        return True

    def allows(self, token_id: int) -> bool:
        return token_id != EOS

    def masks_along(self, draft_token_ids: list[int]) -> list[bytes]:
        return [mask_of(set(range(1, VOCAB)))]

    def forced_token_ids(self) -> list[int]:
        return []


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_decode_whose_token_is_refused_ends_alone(async_scheduling):
    engine = EngineWithoutModel(async_scheduling=async_scheduling, scheduler_type=CountingScheduler)
    requests = {name: make_request(name, [4], max_tokens=12, ignore_eos=True) for name in "ab"}
    engine.scheduler.add_request(requests["a"], 1, (), {0: Refusing()})
    engine.scheduler.add_request(requests["b"], 1)
    engine.run()
    assert (len(engine.tokens["a", 0]), engine.reasons["a", 0]) == (4, "error")
    assert (len(engine.tokens["b", 0]), engine.reasons["b", 0]) == (12, "length")
    assert engine.scheduler.num_continued > 12  # the decodes of both
    engine.scheduler.check_empty()


class Forcing(Refusing):
    """Allows a single text of one token, again and again."""

    def accept(self, token_ids: list[int]) -> bool:
        return set(token_ids) <= {7}

    def allows(self, token_id: int) -> bool:
        return token_id == 7

    def masks_along(self, draft_token_ids: list[int]) -> list[bytes]:
        return [mask_of({7})]

    def forced_token_ids(self) -> list[int]:
        return [7] * 32


@pytest.mark.parametrize("n", [1, 16])
def test_sequences_share_the_forced_tokens_of_a_step(n):
    engine = EngineWithoutModel(
        max_num_seqs=16, max_num_batched_tokens=512, max_model_len=256, num_blocks=1000
    )
    request = make_request("a", [4], n=n, max_tokens=200, ignore_eos=True)
    engine.scheduler.add_request(request, 1, (), {i: Forcing() for i in range(n)})
    engine.run()
    assert all(engine.tokens["a", i] == [7] * 200 for i in range(n))
    num_tokens = max(sum(len(item.token_ids) for item in plan.scheduled) for plan in engine.plans)
    assert num_tokens == (1 + 32 if n == 1 else 16 + MAX_FORCED_TOKENS)

"""Fairness among tenants in short scenarios, and its bound."""

from __future__ import annotations

from collections import Counter

import pytest
from effort import examples
from engine_without_model import EngineWithoutModel, expected_tokens, make_request
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paged_backend.core.fairness.tenant_queue import Account
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError


def ask(engine, name, tenant, *, num_prompt_tokens=2, max_tokens=2, **fields):
    prompt = [1 + len(engine.requests) % 49] * num_prompt_tokens
    request = make_request(
        name, prompt, tenant=tenant, max_tokens=max_tokens, ignore_eos=True, **fields
    )
    engine.requests[name] = request
    engine.add(request)


def make_engine(**options):
    engine = EngineWithoutModel(enable_prefix_caching=False, **options)
    engine.requests = {}
    return engine


def firsts(engine):
    """Requests in the order of their first tokens."""
    return [name for name, _ in engine.tokens]


def served(engine):
    """Weighted tokens of each tenant so far: prompts that were begun, and outputs."""
    costs = Counter()
    for (name, _), tokens in engine.tokens.items():
        request = engine.requests[name]
        costs[request.tenant] += len(request.prompt_token_ids) + 2 * len(tokens)
    return costs


@pytest.mark.parametrize("fair", [True, False])
def test_tenants_take_turns_if_that_is_the_policy(fair):
    engine = make_engine(max_num_seqs=1, fair=fair)
    for name, tenant in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")):
        ask(engine, name, tenant)
    engine.run()
    turns, arrivals = ["a1", "b1", "a2", "b2", "a3"], ["a1", "a2", "a3", "b1", "b2"]
    assert firsts(engine) == (turns if fair else arrivals)


def test_long_answers_and_prompts_cost_turns():
    for fields in ({"max_tokens": 10}, {"num_prompt_tokens": 20}):
        engine = make_engine(max_num_seqs=1)
        for number in range(4):
            ask(engine, f"a{number}", "a", **fields)
            ask(engine, f"b{number}", "b")
        engine.run()
        assert firsts(engine)[:6] == ["a0", "b0", "b1", "b2", "b3", "a1"]


def test_cached_tokens_of_a_prompt_cost_nothing():
    engine = EngineWithoutModel(max_num_seqs=1)
    prompt = list(range(1, 17))
    engine.add(make_request("first", [*prompt, 17], max_tokens=1, tenant="other"))
    engine.run()
    for number in range(3):
        end = 20 + number
        engine.add(make_request(f"a{number}", [*prompt, end], max_tokens=1, tenant="a"))
        engine.add(make_request(f"b{number}", [end] * 3, max_tokens=1, tenant="b"))
    engine.run()
    assert firsts(engine) == ["first", "a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_tenant_does_not_gain_turns_while_it_has_no_requests():
    """One who comes late, or comes back, takes turns from then on."""
    engine = make_engine(max_num_seqs=1)
    ask(engine, "b0", "b")
    for number in range(20):
        ask(engine, f"a{number}", "a")
    while len(engine.reasons) < 10:
        engine.step()
    for number in range(1, 4):
        ask(engine, f"b{number}", "b")
    ask(engine, "new", "c")
    engine.run()
    assert firsts(engine)[10:17] == ["a9", "b1", "new", "a10", "b2", "a11", "b3"]


def test_a_tenant_that_was_served_more_still_waits_when_it_comes_back():
    """So that it does not help to send everything at once and to be gone in between."""
    engine = make_engine(max_num_seqs=4)
    for number in range(3):
        ask(engine, f"a{number}", "a", max_tokens=20)
    for number in range(40):
        ask(engine, f"b{number}", "b")
    while engine.scheduler.is_open("a2"):
        engine.step()
    lead = served(engine)["a"] - served(engine)["b"]
    assert lead > 40
    num_begun = len(engine.tokens)
    ask(engine, "again", "a")
    engine.run()
    cost_each = 2 + 2 * 2
    assert firsts(engine).index("again") - num_begun >= lead // cost_each - 4


def test_priorities_come_before_fairness():
    engine = make_engine(max_num_seqs=1)
    for number in range(3):
        ask(engine, f"a{number}", "a", priority=-1)
        ask(engine, f"b{number}", "b")
    engine.run()
    assert firsts(engine) == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_tenants_are_served_in_proportion_to_their_weights():
    engine = make_engine(max_num_seqs=4, tenant_weights={"gold": 3.0})
    for number in range(300):
        ask(engine, f"g{number}", "gold", max_tokens=6)
        ask(engine, f"f{number}", "free", max_tokens=6)
    for _ in range(400):
        engine.step()
    costs = served(engine)
    assert 2.8 < costs["gold"] / costs["free"] < 3.2


def flood_and_quiet(**options):
    """One holds all seats with long answers, then another asks; returns the steps it waits."""
    engine = make_engine(num_blocks=200, max_num_seqs=8, **options)
    for number in range(20):
        ask(engine, f"a{number}", "a", max_tokens=40)
    for _ in range(4):
        engine.step()
    ask(engine, "b", "b")
    num_steps = 0
    while ("b", 0) not in engine.tokens:
        engine.step()
        num_steps += 1
    return engine, num_steps


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_tenant_with_all_seats_is_preempted_for_another(async_scheduling):
    engine, num_steps = flood_and_quiet(async_scheduling=async_scheduling)
    assert num_steps <= 3
    assert engine.scheduler.stats().num_preemptions == 1
    engine.run()
    for name, request in engine.requests.items():
        assert engine.tokens[name, 0] == expected_tokens(request, 1, 64)


def test_no_sequence_is_preempted_for_a_tenant_without_fairness():
    engine, num_steps = flood_and_quiet(fair=False)
    assert num_steps > 40
    assert engine.scheduler.stats().num_preemptions == 0


def test_a_tenant_with_all_blocks_is_preempted_for_another():
    engine = make_engine(num_blocks=40, max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(6):
        ask(engine, f"a{number}", "a", num_prompt_tokens=20, max_tokens=20)
    for _ in range(3):
        engine.step()
    assert len(engine.tokens) == 6
    ask(engine, "b", "b", num_prompt_tokens=16)
    engine.step()  # a tenant that is new stands behind one who has no more and came before
    engine.step()
    assert firsts(engine)[-1] == "b"
    engine.run()


def test_a_tenant_that_was_served_less_is_not_preempted():
    """It would be the next in turn, before the one that it made way for."""
    engine = make_engine(
        num_blocks=14, max_num_seqs=4, max_num_batched_tokens=4, tenant_weights={"b": 3.0}
    )
    for number, (num_prompt_tokens, max_tokens) in enumerate([(1, 1)] * 3 + [(7, 13), (22, 1)]):
        fields = {"num_prompt_tokens": num_prompt_tokens, "max_tokens": max_tokens}
        ask(engine, f"a{number}", "a", **fields)
    ask(engine, "b", "b", num_prompt_tokens=13, max_tokens=17)
    engine.run()


def test_two_busy_tenants_seldom_preempt_each_other():
    engine = make_engine(num_blocks=400, max_num_seqs=8, max_num_batched_tokens=64)
    for number in range(200):
        ask(engine, f"a{number}", "a", max_tokens=3 + number % 7)
        ask(engine, f"b{number}", "b", max_tokens=3 + number % 5, num_prompt_tokens=6)
    engine.run()
    assert engine.scheduler.stats().num_preemptions <= 4


def test_a_preempted_sequence_goes_before_later_ones_of_its_tenant():
    engine = make_engine(num_blocks=7, max_model_len=24)
    for name in "abc":
        ask(engine, name, "t", num_prompt_tokens=5, max_tokens=9)
    ask(engine, "later", "t")
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    first = engine.scheduler.sequences.waiting.first()
    assert first.request.request_id in "abc" and first.num_output_tokens > 0
    engine.run()


def long_prompt_under_way(**fields):
    """A prompt of four steps, one of which was made, and more of them that wait."""
    engine = make_engine(num_blocks=200, max_num_batched_tokens=16, **fields)
    for number in range(4):
        ask(engine, f"a{number}", "a", num_prompt_tokens=60)
    engine.step()
    return engine


@pytest.mark.parametrize("fair", [True, False])
def test_another_tenant_overtakes_a_prompt_under_way_only_with_fairness(fair):
    engine = long_prompt_under_way(fair=fair)
    ask(engine, "b", "b", num_prompt_tokens=10)
    engine.step()  # a tenant that is new stands behind one who has no more and came before
    engine.step()
    assert firsts(engine) == (["b"] if fair else [])
    engine.run()
    assert firsts(engine) == (["b", "a0"] if fair else ["a0", "a1"]) + firsts(engine)[2:]
    for name, request in engine.requests.items():
        assert engine.tokens[name, 0] == expected_tokens(request, 1, 64)


def test_long_prompts_of_two_tenants_go_on_in_turn():
    engine = long_prompt_under_way()
    ask(engine, "b", "b", num_prompt_tokens=60)
    ask(engine, "later", "a", num_prompt_tokens=1)  # does not pass the others of its tenant
    for _ in range(5):
        engine.step()
    a, b = 0, 4
    planned = [[item.seq_id for item in plan.scheduled] for plan in engine.plans]
    assert planned == [[a], [a], [b], [a], [b], [a, b]]
    engine.run()
    assert firsts(engine)[-1] == "later"


def test_a_request_of_higher_priority_overtakes_a_prompt_under_way():
    engine = long_prompt_under_way()
    ask(engine, "urgent", "a", num_prompt_tokens=10, priority=-1)
    ask(engine, "idle", "b", num_prompt_tokens=1, priority=1)
    engine.run()
    assert firsts(engine)[0] == "urgent"
    assert firsts(engine)[-1] == "idle"


@pytest.mark.parametrize("num_prompt_tokens", [16, 60])
def test_a_flood_of_long_prompts_does_not_delay_other_tenants(num_prompt_tokens):
    """The newcomer waits for the step under way, not for a prompt of the flood."""
    engine = make_engine(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=16)
    waits = []
    for number in range(200):
        ask(engine, f"a{number}", "a", num_prompt_tokens=num_prompt_tokens, max_tokens=1)
    for number in range(20):
        ask(engine, f"b{number}", "b", num_prompt_tokens=4, max_tokens=1)
        before = len(engine.plans)
        while (f"b{number}", 0) not in engine.tokens:
            engine.step()
        waits.append(len(engine.plans) - before)
        for _ in range(5):
            engine.step()
    assert max(waits) <= 2


sizes = st.lists(st.tuples(st.integers(1, 16), st.integers(1, 12)), min_size=1, max_size=6)


# What one gives up its seat for has to be the next in turn until the plan is made.
@example(
    a=[(4, 2), (3, 3), (3, 3)],
    b=[(1, 2), (10, 2), (1, 6), (1, 4), (2, 6)],
    weight=4.0,
    num_seqs=4,
)
@settings(max_examples=examples(25), deadline=None)
@given(a=sizes, b=sizes, weight=st.sampled_from([0.5, 1.0, 4.0]), num_seqs=st.integers(1, 6))
def test_service_of_two_backlogged_tenants_differs_by_a_constant_at_most(a, b, weight, num_seqs):
    """However different their requests: by what one can still get of what runs when it is ahead."""
    engine = make_engine(
        num_blocks=200, max_num_seqs=num_seqs, tenant_weights={"b": weight}, async_scheduling=True
    )
    for number in range(60):
        for tenant, shapes in (("a", a), ("b", b)):
            num_prompt_tokens, max_tokens = shapes[number % len(shapes)]
            fields = {"num_prompt_tokens": num_prompt_tokens, "max_tokens": max_tokens}
            ask(engine, f"{tenant}{number}", tenant, **fields)
    # One may be ahead by all that it runs, and running prompts of the other are not yet counted.
    longest = max(p for p, _ in a + b) + max(m for _, m in a + b)
    bound = 2 * num_seqs * longest / min(1.0, weight)
    while {seq.request.tenant for seq in engine.scheduler.sequences.waiting} == {"a", "b"}:
        engine.step()
        costs = served(engine)
        assert abs(costs["a"] - costs["b"] / weight) <= bound


def test_weights_are_read_from_an_option():
    config = EngineConfig(tenant_weights="gold=4, free=0.5,a=b=1e6")
    assert config.weights_of_tenants() == {"gold": 4.0, "free": 0.5, "a=b": 1e6}
    assert EngineConfig().weights_of_tenants() == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        *((text, "tenant=weight") for text in ("gold", "gold=", "=3", ",", "a=1,", "a=x")),
        *((f"a={weight}", "up to 1000000") for weight in ("0", "-1", "nan", "inf", "2e6")),
        ("a" * 257 + "=1", "1 to 256 characters"),
        ("a=1,a=2", "each once"),
        (",".join(f"t{number}=1" for number in range(4097)), "up to 4096 tenants"),
    ],
)
def test_weights_that_cannot_be_read_are_refused_by_name(text, problem):
    with pytest.raises(ConfigError, match="option tenant_weights") as refused:
        EngineConfig(tenant_weights=text)
    assert problem in str(refused.value) and len(str(refused.value)) < 250


def test_costs_that_are_charged_together_count_the_same() -> None:
    """To the last bit: else the order of tenants would depend on it."""
    together, one_by_one = Account(3.0), Account(3.0)
    for account in (together, one_by_one):
        account.counter = 0.1
    together.charge(7 * 2)
    for _ in range(7):
        one_by_one.charge(2)
    assert together.counter == one_by_one.counter == 0.1 + 14 / 3.0

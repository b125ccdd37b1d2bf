"""How many tokens of each guess a step verifies."""

from __future__ import annotations

import random

import pytest

from paged_backend.speculation.acceptance import (
    Acceptance,
    Evidence,
    Support,
    numbers_of_drafts,
)
from paged_backend.speculation.followers import Followers
from paged_backend.speculation.step_costs import StepCosts


def costs_of(fixed_s: float, token_s: float, sizes: tuple[int, ...] = (1, 4, 9)) -> StepCosts:
    """The costs after many steps that take `fixed_s`, and `token_s` for each token."""
    costs = StepCosts()
    for _ in range(100):
        for size in sizes:
            costs.observe(fixed_s + token_s * size, size)
    return costs


@pytest.mark.parametrize(("fixed_s", "token_s"), [(0.005, 0.001), (0.02, 0.0), (0.001, 0.004)])
def test_costs_are_those_of_the_steps(fixed_s: float, token_s: float) -> None:
    costs = costs_of(fixed_s, token_s)
    assert costs.token_s == pytest.approx(token_s, rel=0.15, abs=3e-4)
    for size in (1, 6, 12):
        assert costs.step_s(size) == pytest.approx(fixed_s + token_s * size, rel=0.15)


def test_a_step_that_waited_for_something_hardly_counts() -> None:
    costs = costs_of(0.005, 0.001)
    before = costs.step_s(1)
    costs.observe(30.0, 1)
    assert costs.step_s(1) < 1.2 * before


@pytest.mark.parametrize("num_tokens", [1, 8, 64])
def test_a_steady_batch_tries_likely_drafts(num_tokens: int) -> None:
    """Steps of one size show what the step takes, and not what a further token takes."""
    costs = costs_of(0.02, 0.0, (num_tokens,))
    assert costs.chance_needed(num_tokens) <= 0.6
    assert numbers_of_drafts({1: [0.9] * 4}, num_tokens, 100, costs)


def test_a_draft_must_be_likelier_in_a_larger_batch() -> None:
    costs = costs_of(0.005, 0.001, (1, 16, 64))
    needed = [costs.chance_needed(number) for number in (1, 16, 64)]
    assert needed == pytest.approx([1 / 6, 16 / 21, 64 / 69], rel=0.05)
    assert StepCosts().chance_needed(1) == 0.0


def test_a_draft_must_give_more_than_it_costs() -> None:
    """Each number is right where no other one gives more tokens per second."""
    for fixed_s, token_s, chance, num_sequences in [
        (0.005, 0.001, 0.9, 1),
        (0.005, 0.001, 0.3, 1),
        (0.005, 0.001, 0.7, 16),
        (0.005, 0.005, 0.95, 4),
        (0.02, 0.0, 0.1, 4),
    ]:
        costs = costs_of(fixed_s, token_s)
        guesses = {seq_id: [chance] * 8 for seq_id in range(num_sequences)}
        numbers = numbers_of_drafts(guesses, num_sequences, 1000, costs)

        def rate(
            number: int,
            chance: float = chance,
            num_sequences: int = num_sequences,
            costs: StepCosts = costs,
        ) -> float:
            tokens = sum(chance**place for place in range(number + 1))
            return num_sequences * tokens / costs.step_s(num_sequences * (number + 1))

        best = max(range(9), key=rate)
        chosen = [numbers.get(seq_id, 0) for seq_id in range(num_sequences)]
        assert all(abs(number - best) <= 1 for number in chosen), (chosen, best)


def test_the_likeliest_drafts_come_first() -> None:
    costs = costs_of(0.02, 0.0)
    assert numbers_of_drafts({1: [0.9] * 4, 2: [0.5] * 4}, 2, 3, costs) == {1: 3}
    assert numbers_of_drafts({1: [0.9] * 2, 2: [0.5] * 4}, 2, 3, costs) == {1: 2, 2: 1}
    assert numbers_of_drafts({1: [0.9] * 2}, 2, 0, costs) == {}
    assert numbers_of_drafts({}, 2, 9, costs) == {}


def test_a_guess_ends_before_its_unlikely_token() -> None:
    costs = costs_of(0.005, 0.001)
    chances = [0.9, 0.95, 0.05, 0.99]
    assert numbers_of_drafts({1: chances}, 1, 100, costs) == {1: 2}
    assert numbers_of_drafts({1: chances[2:]}, 1, 100, costs) == {}


def test_chances_follow_what_was_right() -> None:
    acceptance = Acceptance(decay=1 / 8)
    short, longer, long = (Evidence(length, Support.ONE) for length in (1, 2, 20))
    assert acceptance.chances([short, longer, long]) == [0.3, 0.5, 0.9]
    for _ in range(60):
        acceptance.observe(longer, True)
        acceptance.observe(long, False)
    assert acceptance.chance(Evidence(3, Support.ONE)) > 0.95
    assert acceptance.chance(Evidence(64, Support.ONE)) < 0.05
    assert acceptance.chance(short) == 0.3
    assert acceptance.chance(Evidence(2, Support.MOST)) == 0.4


@pytest.mark.parametrize(
    ("count", "num_places", "support"),
    [
        (1, 1, Support.ONE),
        (2, 2, Support.ALL),
        (2, 3, Support.MOST),
        (1, 2, Support.FEW),
        (1, 3, Support.FEW),
    ],
)
def test_places_agree_about_a_token_or_not(count: int, num_places: int, support: Support) -> None:
    assert Support.of(count, num_places) is support


def test_a_text_begins_with_the_chances_of_all_texts() -> None:
    """It goes on with its own, apart for tokens that are steady."""
    usual = Acceptance()
    steady, changing = (Evidence(4, Support.ALL, is_steady) for is_steady in (True, False))
    for _ in range(1000):
        usual.observe(steady, True)
        usual.observe(changing, False)
    of_text = usual.copy(decay=1 / 4)
    assert of_text.chances([steady, changing]) == pytest.approx([1, 0], abs=1e-3)
    of_text.observe(steady, False)
    assert of_text.chance(steady) == pytest.approx(0.75, abs=1e-3)
    assert usual.chance(steady) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("sizes", [(1, 3), (40, 200), (1, 40, 2, 100)])
def test_tokens_are_steady_if_the_same_one_followed_twice(sizes: tuple[int, ...]) -> None:
    """Tokens arrive one at a time and many at once."""
    rng = random.Random(sum(sizes))
    followers, text = Followers(16, -1), [-1]
    for _ in range(20):
        added = [rng.randrange(9) if rng.random() < 0.3 else 7 for _ in range(rng.choice(sizes))]
        followers.extend(added)
        text += added
        for token_id in range(9):
            after = [text[i + 1] for i in range(len(text) - 1) if text[i] == token_id][-2:]
            is_steady = len(after) == 2 and after[0] == after[1]
            assert followers.are_steady([token_id]) == [is_steady]

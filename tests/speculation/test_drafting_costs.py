"""A draft model costs no more than it gives: the drafter on a device with given times."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from paged_backend import SamplingParams
from paged_backend.core.drafter import NO_DRAFT
from paged_backend.core.scheduler_output import (
    ContinuedDecodes,
    DraftPass,
    DrawnDrafts,
    SchedulerOutput,
    Slice,
)
from paged_backend.core.sequence import PLACEHOLDER, Sequence, SequenceStatus
from paged_backend.speculation.draft_model import ModelDrafter
from paged_backend.speculation.drafting_costs import DraftingCosts
from paged_backend.speculation.drafting_rule import PayingDrafts
from paged_backend.values.options.speculation import SpeculativeConfig
from paged_backend.values.request import Request

RIGHT, WRONG = 7, 8
PROMPT, ANSWER = 60, 300
HOST_S = 0.001
"""The time of the host between two steps that wait for each other's tokens."""


@dataclass
class Device:
    """A model and a draft model with the seconds that their steps take.

    Prompts of the model take the same time with and without drafts, and are not simulated.
    """

    model_s: Callable[[int], float]  # by the number of tokens
    draft_s: Callable[[int], float]
    noise: float = 0.05
    cold_s: float = 0.05  # that the first steps of each size take longer

    def __post_init__(self) -> None:
        self.exact_s = 0.0  # without noise
        self._random = random.Random(0)
        self._drafted: dict[int, int] = {}  # tokens that the draft model has computed
        self._seen: dict[tuple[bool, int], int] = {}

    def time(self, is_draft: bool, num_tokens: int) -> float:
        number = self._seen[is_draft, num_tokens] = self._seen.get((is_draft, num_tokens), 0) + 1
        seconds = (self.draft_s if is_draft else self.model_s)(num_tokens)
        cold_s = self.cold_s if number <= 2 else 0.0
        self.exact_s += seconds + cold_s
        waited = 10.0 if self._random.random() < 0.002 else 1.0
        noise = self._random.uniform(1 - self.noise, 1 + self.noise)
        return seconds * waited * noise + cold_s

    def draw(self, sequences: dict[int, Sequence], numbers: dict[int, int]) -> list[DraftPass]:
        passes: list[DraftPass] = []
        for place in range(max(numbers.values(), default=0)):
            rows = [seq_id for seq_id, number in numbers.items() if number > place]
            num_tokens = 0
            for seq_id in rows:
                end = sequences[seq_id].num_known_tokens + place
                num_tokens += end - self._drafted.get(seq_id, 0)
                self._drafted[seq_id] = end
            passes.append(DraftPass(num_tokens, len(rows), self.time(True, num_tokens)))
        return passes


class Simulation:
    """Sequences that a drafter drafts for, each of which is replaced when it ends.

    Args:
        device: the times.
        chance: returns the chance that a draft is right, at a step.
        at_once: number of sequences.
        goes_ahead: steps are scheduled while the one before computes, unless the drafter waits.
    """

    def __init__(
        self,
        device: Device,
        chance: Callable[[int], float],
        at_once: int,
        goes_ahead: bool = False,
    ) -> None:
        config = SpeculativeConfig(method="draft_model", model="m")
        self.drafter = ModelDrafter(config)
        self.device, self.chance, self.at_once = device, chance, at_once
        self.goes_ahead = goes_ahead
        self.sequences: dict[int, Sequence] = {}
        self.num_started = self.num_steps = self.num_drafts = self.num_drafts_of_last = 0
        self.random = random.Random(1)
        self.plain_s = 0.0

    def fill(self) -> None:
        while len(self.sequences) < self.at_once:
            self.num_started += 1
            request = Request(f"r{self.num_started}", [5] * PROMPT, SamplingParams())
            length = PROMPT + self.random.randint(ANSWER // 2, ANSWER)
            seq = Sequence(self.num_started, request, 0, 0, frozenset(), length)
            seq.status = SequenceStatus.RUNNING
            seq.token_ids.append(RIGHT)
            self.sequences[seq.seq_id] = seq

    def step(self) -> None:
        self.fill()
        self.num_steps += 1
        is_ahead = self.goes_ahead and not self.num_drafts_of_last and not self.waits()
        drafts = self.drafter.propose([] if is_ahead else self.sequences.values(), 64)
        numbers = {
            seq_id: len(draft.token_ids) for seq_id, draft in drafts.items() if draft.token_ids
        }
        assert sum(numbers.values()) <= 64
        assert all(set(draft.token_ids) == {PLACEHOLDER} for draft in drafts.values())
        passes = self.device.draw(self.sequences, numbers)
        chance = self.chance(self.num_steps)
        drawn = {
            seq_id: [RIGHT if self.random.random() < chance else WRONG for _ in range(number)]
            for seq_id, number in numbers.items()
        }
        if drawn:
            self.drafter.take_drafts(DrawnDrafts(drawn, passes))
        num_tokens = len(self.sequences) + sum(numbers.values())
        seconds = self.device.time(False, num_tokens) + sum(item.seconds for item in passes)
        if self.goes_ahead and not is_ahead:
            seconds += HOST_S
            self.device.exact_s += HOST_S
        slices = [
            Slice(
                seq_id,
                0,
                1 + numbers.get(seq_id, 0),
                [],
                0,
                [],
                [PLACEHOLDER] * numbers.get(seq_id, 0),
                [seq_id],
                None,
            )
            for seq_id in self.sequences
        ]
        self.num_drafts_of_last = sum(numbers.values())
        self.num_drafts += self.num_drafts_of_last
        self.drafter.observe_step(
            seconds, SchedulerOutput([], [], ContinuedDecodes([], [], []), slices, 0, [])
        )
        self.plain_s += self.take(drawn) / len(slices) * self.device.model_s(len(slices))

    def waits(self) -> bool:
        """Return True if the drafter waits until the tokens in flight are known."""
        for seq in self.sequences.values():
            seq.num_output_placeholders = 1
        awaited = self.drafter.awaits(self.sequences.values())
        for seq in self.sequences.values():
            seq.num_output_placeholders = 0
        assert awaited in (set(), self.sequences.keys())
        return bool(awaited)

    def take(self, drawn: dict[int, list[int]]) -> int:
        """Add what the model answers, and return the number of tokens."""
        before = sum(seq.num_tokens for seq in self.sequences.values())
        for seq in self.sequences.values():
            tokens = drawn.get(seq.seq_id, [])
            right = next((i for i, token in enumerate(tokens) if token == WRONG), len(tokens))
            seq.token_ids += [RIGHT] * (right + 1)
            number = seq.num_known_tokens - 1
            drafted = self.device._drafted
            drafted[seq.seq_id] = min(drafted.get(seq.seq_id, 0), number)
        gained = sum(seq.num_tokens for seq in self.sequences.values()) - before
        for seq in list(self.sequences.values()):
            if seq.num_known_tokens >= seq.max_num_tokens:
                seq.status = SequenceStatus.FINISHED
                del self.sequences[seq.seq_id]
        return gained

    def ratio(self, num_steps: int) -> float:
        """Tokens per second over the next steps, divided by those without drafts."""
        self.plain_s, self.device.exact_s, self.num_drafts = 0.0, 0.0, 0
        for _ in range(num_steps):
            self.step()
        return self.plain_s / self.device.exact_s


def line(fixed_s: float, token_s: float) -> Callable[[int], float]:
    return lambda num_tokens: fixed_s + token_s * num_tokens


def bent(num_tokens: int) -> float:
    """A step of one row has a kernel of its own; prompts are cheaper than rows."""
    return 0.010 if num_tokens == 1 else 0.016 + 0.001 * min(num_tokens, 32) + 0.0002 * num_tokens


MODELS = {"line": line(0.010, 0.001), "flat": line(0.010, 0.0001), "bent": bent}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("at_once", [1, 6])
@pytest.mark.parametrize("chance", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("model", MODELS)
def test_a_draft_model_as_slow_as_the_model_costs_nothing(
    model: str, chance: float, at_once: int
) -> None:
    simulation = Simulation(Device(MODELS[model], MODELS[model]), lambda _: chance, at_once)
    simulation.ratio(1000)
    assert simulation.ratio(2500) > 0.97


@pytest.mark.parametrize("goes_ahead", [False, True])
@pytest.mark.parametrize("at_once", [1, 6])
@pytest.mark.parametrize("share", [0.3, 0.1, 0.02])
def test_drafts_that_are_never_right_cost_little(
    share: float, at_once: int, goes_ahead: bool
) -> None:
    device = Device(line(0.010, 0.001), line(0.010 * share, 0.001 * share))
    simulation = Simulation(device, lambda _: 0.0, at_once, goes_ahead)
    simulation.ratio(1000)
    assert simulation.ratio(2500) > 0.97
    assert simulation.num_drafts > 5  # it still tries some


def best_ratio(
    model: Callable[[int], float],
    draft: Callable[[int], float],
    chance: float,
    host_s: float = 0.0,
) -> float:
    """The largest gain for one sequence, if each step has the same number of drafts."""
    ratios = []
    for number in range(1, 17):
        tokens = sum(chance**place for place in range(number + 1))
        seconds = model(1 + number) + draft(2) + (number - 1) * draft(1) + host_s
        ratios.append(tokens / seconds * model(1))
    return max(ratios)


@pytest.mark.sampled
@pytest.mark.parametrize("chance", [1.0, 0.9, 0.7])
@pytest.mark.parametrize(
    ("model", "goes_ahead"), [*[(model, False) for model in MODELS], ("flat", True)]
)
def test_a_cheap_draft_model_keeps_its_gain(model: str, goes_ahead: bool, chance: float) -> None:
    device = Device(MODELS[model], lambda number: MODELS[model](number) / 10)
    simulation = Simulation(device, lambda _: chance, 1, goes_ahead)
    simulation.ratio(1000)
    best = best_ratio(device.model_s, device.draft_s, chance, HOST_S if goes_ahead else 0.0)
    if best > 1.1:
        assert simulation.ratio(2500) > 1 + 0.7 * (best - 1)


def test_a_text_that_becomes_easier_to_guess_is_noticed() -> None:
    device = Device(line(0.010, 0.0002), line(0.001, 0.00002))
    simulation = Simulation(device, lambda step: float(step > 2000), 2)
    simulation.ratio(1900)
    assert simulation.ratio(100) > 0.9
    simulation.ratio(400)
    assert simulation.ratio(500) > 2


GPU = line(0.0046, 0.00002), line(0.0012, 0.00001)
"""An H200 with Llama-3-8B and a draft model of Llama-3.2-1B's shape."""


def test_more_sequences_at_once_are_tried_again() -> None:
    """What one sequence's drafts take shows little: a GPU reads the weights once for all of 8."""
    simulation = Simulation(Device(*GPU, cold_s=0.0), lambda _: 0.8, 1, goes_ahead=True)
    simulation.ratio(500)
    simulation.at_once = 8
    simulation.ratio(500)
    assert simulation.ratio(1000) > 1.25


@pytest.mark.parametrize("at_once", [8, 16])
def test_a_slow_first_step_does_not_end_all_drafts(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step with many drafts may wait for something else, and take 4 times as long."""
    device = Device(line(0.010, 0.00002), line(0.001, 0.00001), cold_s=0.0)
    simulation = Simulation(device, lambda _: 0.8, 1, goes_ahead=True)
    simulation.ratio(500)
    simulation.at_once, seen = at_once, list[int]()

    def time(is_draft: bool, num_tokens: int, measured: Any = device.time) -> float:
        seconds: float = measured(is_draft, num_tokens)
        if not is_draft and num_tokens > at_once + 1:
            seen.append(num_tokens)
            return seconds * (4 if len(seen) <= 4 else 1)
        return seconds

    monkeypatch.setattr(device, "time", time)
    simulation.ratio(1000)
    assert simulation.ratio(1000) > 1.3


def test_a_long_prompt_is_not_computed_twice_for_a_short_answer() -> None:
    """The draft model lacks the prompt, which takes longer than its drafts save."""
    costs = DraftingCosts()
    for _ in range(10):
        costs.observe_plain(0.010, 1)
        drawn = [DraftPass(1000, 1, 0.101), *[DraftPass(1, 1, 0.001)] * 3]
        costs.observe_drafted(0.114, 1, DrawnDrafts({1: [RIGHT] * 4}, drawn))
    assert costs.catch_up_s(200) == pytest.approx(0.02, rel=0.01)
    rule = PayingDrafts()
    rule._costs, rule._saved_s = costs, 0.05
    drafter = ModelDrafter(SpeculativeConfig(method="draft_model", model="m"), rule)

    def drafts(num_prompt_tokens: int, max_tokens: int) -> int:
        request = Request("r", [5] * num_prompt_tokens, SamplingParams())
        seq = Sequence(1, request, 0, 0, frozenset(), num_prompt_tokens + max_tokens)
        seq.status = SequenceStatus.RUNNING
        seq.token_ids.append(RIGHT)
        drafter._guessed.clear()
        return len(drafter.propose([seq], 64).get(1, NO_DRAFT).token_ids)

    assert drafts(40, 200) > 0 and drafts(1000, 200) > 0
    assert drafts(40, 8) > 0 and drafts(1000, 8) == 0


def test_a_step_that_seems_shorter_than_its_passes_tells_nothing() -> None:
    """An earlier step was in flight, and its time has the passes."""
    costs = DraftingCosts()
    drawn = DrawnDrafts({1: [RIGHT]}, [DraftPass(1, 1, 0.002)])
    for _ in range(4):
        assert costs.observe_drafted(0.001, 1, drawn) is None
    assert costs._verified.num_steps == costs._passes.num_steps == 0
    assert costs.observe_drafted(0.012, 1, drawn) == pytest.approx(0.012)


def test_sequences_that_always_go_ahead_are_forgotten_when_they_end() -> None:
    """While there are prompts in each step, no times are measured, and nobody is drafted for."""
    drafter = ModelDrafter(SpeculativeConfig(method="draft_model", model="m"))
    for number in range(10):
        request = Request(f"r{number}", [5] * PROMPT, SamplingParams())
        seq = Sequence(number, request, 0, 0, frozenset(), PROMPT + ANSWER)
        seq.status, seq.num_output_placeholders = SequenceStatus.RUNNING, 1
        seq.token_ids.append(PLACEHOLDER)
        assert drafter.awaits([seq]) == set() and drafter.propose([], 64) == {}
        seq.status = SequenceStatus.FINISHED
    assert len(drafter._guessed) == 1


def test_the_plan_has_the_largest_rate() -> None:
    """Numbers of drafts for two sequences, compared with all others."""
    rng = random.Random(3)
    for _ in range(200):
        costs = DraftingCosts()
        fixed_s, token_s, pass_s, drawn_s = (rng.uniform(0.0001, 0.01) for _ in range(4))
        for size in (2, 3, 5, 9) * 40:
            costs.observe_plain(fixed_s + token_s * size, size)
            item = DraftPass(size, size, pass_s + drawn_s * size)
            seconds = fixed_s + token_s * size + item.seconds
            costs.observe_drafted(seconds, 0, DrawnDrafts({1: [RIGHT] * size}, [item]))
        chances = {1: (rng.random(), 4), 2: (rng.random(), 3)}
        budget = rng.choice([2, 4, 64])

        def rate(
            one: int,
            two: int,
            chances: dict[int, tuple[float, int]] = chances,
            costs: DraftingCosts = costs,
        ) -> float:
            tokens = sum(
                chances[seq_id][0] ** place
                for seq_id, number in ((1, one), (2, two))
                for place in range(number + 1)
            )
            passes = [number for number in (one, two) if number]
            seconds = costs._verified.step_s(2) + costs._verified.token_s * (one + two)
            seconds += costs._passes.step_s(0) * max(passes, default=0)
            return tokens / (seconds + costs._passes.token_s * (one + two))

        plan = costs.plan(chances, 2, budget)
        found = rate(plan.numbers.get(1, 0), plan.numbers.get(2, 0))
        pairs = [(i, j) for i in range(5) for j in range(4) if i + j <= budget]
        best = max(rate(*pair) for pair in pairs)
        plain = 2 / costs.plain_s(2)
        if plan.numbers:
            assert sum(plan.numbers.values()) <= budget
            assert found > 1.05 * plain
            assert found > (0.97 if budget < 7 else 0.9999) * best
        else:
            assert best < 1.06 * plain

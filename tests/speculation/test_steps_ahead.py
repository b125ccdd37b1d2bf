"""Speculation with steps that are scheduled ahead, on a device that is only simulated."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import reduce

import pytest
from free_drafts import make_drafts_free

from paged_backend.core.scheduler_output import DraftGuide, LaunchedStep, SchedulerOutput
from paged_backend.engine.engine import Engine
from paged_backend.speculation.step_costs import StepCosts
from paged_backend.tools.bench.requests import greedy
from paged_backend.tools.bench.simulated_device import SimulatedDrafts, SimulatedExecutor
from paged_backend.values.config import EngineConfig
from paged_backend.values.outputs import DraftCounts, SequenceOutput

VOCAB_SIZE, NUM_SEQS = 30_000, 8


def engine_on_device(
    speculates: bool,
    answers: dict[int, list[int]] | None = None,
    num_seqs: int = NUM_SEQS,
    step_s: float = 0.0001,
    drafts: SimulatedDrafts | None = None,
) -> Engine:
    """An engine with requests that decode new text, or the answers by their numbers."""
    speculation = {"method": "suffix"} if drafts is None else {"method": "mtp"}
    config = EngineConfig.from_mapping(
        {
            "model": "demo",
            "speculative_config": speculation if speculates else None,
            "async_scheduling": True,
            "max_num_seqs": NUM_SEQS,
        }
    )
    executor = SimulatedExecutor(config, VOCAB_SIZE, 512, answers, drafts)
    engine = Engine(config, executor)
    rng = random.Random(0)
    for number in range(num_seqs):
        prompt = rng.sample(range(VOCAB_SIZE), 100)
        request = greedy(str(number), prompt, 200)
        engine.add_request(replace(request, params=replace(request.params, seed=number)))
    executor.device.reset(step_s)
    return engine


def steps_in_flight(
    speculates: bool, answers: dict[int, list[int]] | None = None, num_seqs: int = NUM_SEQS
) -> list[int]:
    """The number of steps in flight after each step, while all sequences decode."""
    engine = engine_on_device(speculates, answers, num_seqs)
    found = []
    while engine.has_unfinished:
        engine.step()
        found.append(len(engine._in_flight))
    assert engine.stats().num_generation_tokens == 200 * num_seqs
    return found


def verify_each_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts cost nothing: the times of a busy machine would decide about them."""
    monkeypatch.setattr(StepCosts, "token_s", 0.0)


def test_a_drafter_without_guesses_leaves_no_step_out() -> None:
    """The device has its next step before it ends one, as often as without a drafter."""
    plain = steps_in_flight(speculates=False)
    found = steps_in_flight(speculates=True)
    # On a busy machine, the measured times may let a sequence wait for a guess once.
    assert found.count(1) >= plain.count(1) and len(found) <= len(plain) + 1
    assert plain.count(1) > 0.9 * len(plain)


@pytest.mark.parametrize("num_seqs", [1, NUM_SEQS])
def test_steps_follow_each_other_while_text_repeats_itself(
    num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step is launched before the one before it is over, and has drafts of all sequences."""
    verify_each_guess(monkeypatch)
    answers = {seed: [*range(20)] * 10 for seed in range(num_seqs)}
    engine = engine_on_device(True, answers, num_seqs, step_s=0.01)  # longer than the host takes
    middle = numbers_of(engine)[22:-2]
    stats = engine.stats()
    assert stats.num_generation_tokens == 200 * num_seqs
    assert stats.num_steps < 100  # drafts were right
    assert sum(in_flight == 1 for in_flight, _ in middle) > 0.9 * len(middle)
    assert sum(drafted == num_seqs for _, drafted in middle) > 0.8 * len(middle)


def test_a_draft_model_guesses_while_a_step_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of its drafts are wrong."""
    make_drafts_free(monkeypatch)
    rng = random.Random(1)
    answers = {seed: rng.choices(range(VOCAB_SIZE), k=200) for seed in range(NUM_SEQS)}
    drafts = SimulatedDrafts(pass_s=0.001, chance=0.8)
    engine = engine_on_device(True, answers, step_s=0.02, drafts=drafts)
    middle = numbers_of(engine)[5:25]  # the first sequences end after them
    stats = engine.stats()
    assert stats.num_generation_tokens == 200 * NUM_SEQS
    assert 0.2 < stats.num_accepted_tokens / stats.num_draft_tokens < 0.3
    assert sum(in_flight == 1 for in_flight, _ in middle) > 0.9 * len(middle)
    # A step has 64 drafts at most, and a sequence 16.
    assert sum(drafted == 4 for _, drafted in middle) > 0.8 * len(middle)


def numbers_of(engine: Engine) -> list[tuple[int, int]]:
    """The steps in flight when each step was launched, and its sequences with drafts."""
    numbers, launch = list[tuple[int, int]](), engine.executor.launch

    def watched(output: SchedulerOutput, guide: DraftGuide | None = None) -> LaunchedStep:
        drafted = sum(bool(item.draft_token_ids) for item in output.slices)
        numbers.append((len(engine._in_flight), drafted))
        return launch(output, guide)

    engine.executor.launch = watched  # type: ignore[method-assign]
    while engine.has_unfinished:
        engine.step()
    return numbers


def counts_of(engine: Engine) -> list[DraftCounts]:
    """A list to which the counts of the drafts of all outputs will be added."""
    counts, step = list[DraftCounts](), engine.step

    def counted() -> list[SequenceOutput]:
        outputs = step()
        counts.extend(output.drafts for output in outputs if output.drafts is not None)
        return outputs

    engine.step = counted  # type: ignore[method-assign]
    return counts


@pytest.mark.parametrize("num_seqs", [1, NUM_SEQS])
def test_predictions_are_verified_while_a_step_is_in_flight(
    num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device has them, so no sequence waits; every 20th of their tokens is wrong."""
    verify_each_guess(monkeypatch)
    answers = {seed: list(range(1000 * seed, 1000 * seed + 200)) for seed in range(num_seqs)}
    engine = engine_on_device(True, answers, num_seqs=0, step_s=0.01)
    for seed, answer in answers.items():
        predicted = [token + 20_000 * (token % 20 == 19) for token in answer]
        request = replace(greedy(str(seed), [7], 200), predicted_token_ids=predicted)
        engine.add_request(replace(request, params=replace(request.params, seed=seed)))
    counts = counts_of(engine)
    middle = numbers_of(engine)[8:-2]
    drafts = reduce(DraftCounts.plus, counts)
    assert drafts.num_predicted_accepted == drafts.num_accepted > 120 * num_seqs
    # After a wrong token of a prediction, nothing matches.
    assert drafts.num_tokens > drafts.num_predicted > 0.6 * drafts.num_tokens
    assert engine.stats().num_steps < 80
    assert sum(in_flight == 1 for in_flight, _ in middle) > 0.9 * len(middle)
    assert sum(drafted for _, drafted in middle) > 0.6 * num_seqs * len(middle)


@pytest.mark.parametrize("num_seqs", [1, NUM_SEQS])
def test_earlier_answers_are_verified_while_a_step_is_in_flight(
    num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device gets the part of an answer that a sequence repeats, once; no sequence waits.

    Each sequence repeats the answer of another one, with every 50th token changed.
    """
    verify_each_guess(monkeypatch)
    earlier = {seed: list(range(1000 * seed, 1000 * seed + 200)) for seed in range(num_seqs)}
    changed = {
        num_seqs + seed: [token + 20_000 * (token % 50 == 49) for token in answer]
        for seed, answer in earlier.items()
    }
    engine = engine_on_device(True, earlier | changed, num_seqs, step_s=0.01)
    while engine.has_unfinished:
        engine.step()
    before = engine.stats()
    for seed in changed:
        request = greedy(str(seed), [29_999], 200)
        engine.add_request(replace(request, params=replace(request.params, seed=seed)))
    references: list[int] = []
    launch = engine.executor.launch

    def watched(output: SchedulerOutput, guide: DraftGuide | None = None) -> LaunchedStep:
        sent = [item for item in output.slices if item.reference_token_ids]
        references.extend(item.seq_id for item in sent)
        assert all(len(item.reference_token_ids) <= 200 for item in sent)
        return launch(output, guide)

    engine.executor.launch = watched  # type: ignore[method-assign]
    counts = counts_of(engine)
    middle = numbers_of(engine)[8:-2]
    stats = engine.stats()
    assert stats.num_generation_tokens == 400 * num_seqs
    assert not any(each.num_predicted for each in counts)
    assert stats.num_accepted_tokens - before.num_accepted_tokens > 80 * num_seqs
    assert stats.num_steps - before.num_steps < 120  # without drafts 200
    assert sum(in_flight == 1 for in_flight, _ in middle) > 0.9 * len(middle)
    assert len(references) == len(set(references)) == num_seqs


def test_the_device_gets_a_step_before_outputs_are_sent() -> None:
    """The only sequence repeats itself, so it waits for its tokens and is drafted for."""
    answers = {0: [*range(20)] * 10}
    found = steps_in_flight(speculates=True, answers=answers, num_seqs=1)
    assert len(found) < 100  # drafts were right
    assert all(found[:-1])

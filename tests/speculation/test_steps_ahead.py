"""Speculation with steps that are scheduled ahead, on a device that is only simulated."""

from __future__ import annotations

import random
from dataclasses import replace

from paged_backend.engine.engine import Engine
from paged_backend.tools.bench.requests import greedy
from paged_backend.tools.bench.simulated_device import SimulatedExecutor
from paged_backend.values.config import EngineConfig

VOCAB_SIZE, NUM_SEQS = 30_000, 8


def steps_in_flight(
    speculates: bool, answers: dict[int, list[int]] | None = None, num_seqs: int = NUM_SEQS
) -> list[int]:
    """The number of steps in flight after each step, while all sequences decode.

    They decode new text, or the answers by their numbers.
    """
    config = EngineConfig.from_mapping(
        {
            "model": "demo",
            "speculative_config": {"method": "suffix"} if speculates else None,
            "async_scheduling": True,
            "max_num_seqs": NUM_SEQS,
        }
    )
    executor = SimulatedExecutor(config, VOCAB_SIZE, 512, answers)
    engine = Engine(config, executor)
    rng = random.Random(0)
    for number in range(num_seqs):
        prompt = rng.sample(range(VOCAB_SIZE), 100)
        request = greedy(str(number), prompt, 200)
        engine.add_request(replace(request, params=replace(request.params, seed=number)))
    executor.device.reset(0.0001)
    found = []
    while engine.has_unfinished:
        engine.step()
        found.append(len(engine._in_flight))
    assert engine.stats().num_generation_tokens == 200 * num_seqs
    return found


def test_a_drafter_without_guesses_leaves_no_step_out() -> None:
    """The device has its next step before it ends one, as often as without a drafter."""
    plain = steps_in_flight(speculates=False)
    assert steps_in_flight(speculates=True) == plain
    assert plain.count(1) > 0.9 * len(plain)


def test_the_device_gets_a_step_before_outputs_are_sent() -> None:
    """The only sequence repeats itself, so it waits for its tokens and is drafted for."""
    answers = {0: [*range(20)] * 10}
    found = steps_in_flight(speculates=True, answers=answers, num_seqs=1)
    assert len(found) < 100  # drafts were right
    assert all(found[:-1])

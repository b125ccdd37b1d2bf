"""Drafts of a draft model that cost nothing, for tests on machines that may be busy."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from functools import partial

import pytest

from paged_backend.core.scheduler_output import SchedulerOutput
from paged_backend.speculation.draft_model import ModelDrafter
from paged_backend.speculation.drafting_rule import Candidate, DraftingRule
from paged_backend.values.options.speculation import SpeculativeConfig


class FreeDrafts(DraftingRule):
    """Lets steps verify as many drafts as they may."""

    def numbers(
        self, candidates: Sequence[Candidate], num_sequences: int, budget: int
    ) -> Mapping[int, int]:
        numbers: dict[int, int] = {}
        for item in candidates:
            if budget > 0:
                numbers[item.seq_id] = min(item.max_drafts, budget)
                budget -= numbers[item.seq_id]
        return numbers


class AnyDrafts(DraftingRule):
    """Gives each sequence a random number of drafts, and in some steps none to anybody."""

    def __init__(self) -> None:
        self._random = random.Random(0)

    def numbers(
        self, candidates: Sequence[Candidate], num_sequences: int, budget: int
    ) -> Mapping[int, int]:
        if self._random.random() < 0.2:
            return {}
        numbers = {item.seq_id: self._random.randint(0, item.max_drafts) for item in candidates}
        return {seq_id: number for seq_id, number in numbers.items() if number}


def make_drafts_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines make their drafters with this rule."""
    drafter = partial(ModelDrafter, rule=FreeDrafts())
    monkeypatch.setattr("paged_backend.engine.engine.ModelDrafter", drafter)


SeenDrafts = list[tuple[list[int], list[int]]]
"""Drafts, each with the tokens that were known when they were drawn."""


def see_drafts(
    monkeypatch: pytest.MonkeyPatch, rule: type[DraftingRule] = FreeDrafts
) -> SeenDrafts:
    """Let a rule decide; returns a list to which all drafts that are drawn will be added."""
    seen: SeenDrafts = []

    class Drafter(ModelDrafter):
        def observe_step(self, seconds: float, output: SchedulerOutput) -> None:
            super().observe_step(seconds, output)
            for item, drafts, num_known in self._returned:
                seen.append((item.seq.token_ids[:num_known], drafts))

    def drafter(config: SpeculativeConfig, *, draws_ahead: bool) -> Drafter:
        return Drafter(config, rule(), draws_ahead=draws_ahead)

    monkeypatch.setattr("paged_backend.engine.engine.ModelDrafter", drafter)
    return seen

"""Drafts of a draft model that cost nothing, for tests on machines that may be busy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import pytest

from paged_backend.core.scheduler_output import DrawnDrafts
from paged_backend.speculation.draft_model import ModelDrafter
from paged_backend.speculation.drafting_rule import Candidate, DraftingRule


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


def make_drafts_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines make their drafters with this rule."""
    drafter = partial(ModelDrafter, rule=FreeDrafts())
    monkeypatch.setattr("paged_backend.engine.engine.ModelDrafter", drafter)


SeenDrafts = list[tuple[list[int], list[int]]]
"""Drafts, each with the tokens that were known when they were drawn."""


def see_drafts(monkeypatch: pytest.MonkeyPatch) -> SeenDrafts:
    """Make drafts free, and return a list to which all that are drawn will be added."""
    seen: SeenDrafts = []

    class Drafter(ModelDrafter):
        def take_drafts(self, drawn: DrawnDrafts) -> None:
            super().take_drafts(drawn)
            for seq_id, drafts in drawn.token_ids.items():
                seq = self._guessed[seq_id].seq
                seen.append((seq.token_ids[: seq.num_known_tokens], drafts))

    drafter = partial(Drafter, rule=FreeDrafts())
    monkeypatch.setattr("paged_backend.engine.engine.ModelDrafter", drafter)
    return seen

"""Drafts of a draft model that cost nothing, for tests on machines that may be busy."""

from __future__ import annotations

import pytest

from paged_backend.speculation.draft_model import ModelDrafter
from paged_backend.speculation.drafting_costs import DraftingCosts, DraftPlan


def make_drafts_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps verify as many drafts as they may."""

    def plan(
        self: DraftingCosts, chances: dict[int, tuple[float, int]], sequences: int, budget: int
    ) -> DraftPlan:
        numbers = {}
        for seq_id, (_, length) in chances.items():
            if budget > 0:
                numbers[seq_id] = min(length, budget)
                budget -= numbers[seq_id]
        return DraftPlan(numbers, dict.fromkeys(numbers, 1.0), dict.fromkeys(numbers, 2.0))

    monkeypatch.setattr(DraftingCosts, "plan", plan)
    monkeypatch.setattr(ModelDrafter, "_save", lambda *_: None)
    monkeypatch.setattr(DraftingCosts, "knows_plain", lambda *_: True)
    monkeypatch.setattr(DraftingCosts, "catch_up_s", lambda *_: 0.0)
    monkeypatch.setattr("paged_backend.speculation.draft_model._REFRESH", float("inf"))
    monkeypatch.setattr(DraftingCosts, "plain_s", lambda *_: 1.0)

"""Rows of logits of many kinds, and stacks that betray what is read before it is written."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from paged_kernels._selection import LANES as _LANES
from torch import Tensor

LANES = _LANES.value
LARGEST = torch.finfo(torch.float32).max

Stacks = list[tuple[Tensor, Tensor]]


def poisoned_stacks(monkeypatch: pytest.MonkeyPatch, operation: ModuleType) -> Iterator[Stacks]:
    """The stacks of each call. What is read before it is written would win every draw."""
    made: Stacks = []
    guards: list[Tensor] = []
    original = operation.make_stacks

    def poisoned(logits: Tensor) -> tuple[Tensor, Tensor]:
        rows = logits.shape[0]
        values, tokens = original(torch.cat([logits, logits[-1:]]))
        values.fill_(LARGEST)
        tokens.fill_(-1)
        made.append((values[:rows], tokens[:rows]))
        guards.extend((values[rows:], tokens[rows:]))
        return made[-1]

    monkeypatch.setattr(operation, "make_stacks", poisoned)
    yield made
    for guard in guards:
        assert (guard == (LARGEST if guard.is_floating_point() else -1)).all()


def logits_of(kind: str, vocab: int) -> Tensor:
    x = torch.randn(vocab)
    if kind == "peaked":
        return x * 5
    if kind == "flat":
        return x * 0.3
    if kind == "coarse":  # as from a product in bfloat16: many equal ones
        return (x * 3).bfloat16().float()
    if kind == "descending":  # all the likeliest in the same few lanes' reach
        return (x * 4).sort(descending=True).values
    if kind == "masked":
        return torch.where(torch.rand(vocab) < 0.995, -torch.inf, x * 3)
    assert kind == "strided"  # the likeliest all belong to one lane
    x[7::LANES] += 20
    return x

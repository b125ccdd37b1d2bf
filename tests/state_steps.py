"""Steps of layers that keep a state per sequence, for tests of their kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """The sequences of a step.

    Attributes:
        lengths: the number of rows of each.
        sources: the slot that each state is read from; 0 stands for zeros.
        targets: the slot that each state is written to.
    """

    lengths: Sequence[int]
    sources: Sequence[int]
    targets: Sequence[int]

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    def tensors(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Return `slots` [num_seqs, 2] and `query_start_loc` [num_seqs + 1], both int32."""
        slots = torch.tensor([*zip(self.sources, self.targets, strict=True)], dtype=torch.int32)
        starts = torch.tensor([0, *self.lengths]).cumsum(0).int()
        return slots.to(device), starts.to(device)


RAGGED = Step(
    lengths=[1, 7, 0, 1, 3, 1, 0, 2],
    sources=[3, 0, 9, 5, 1, 0, 0, 8],
    targets=[3, 2, 9, 6, 1, 4, 0, 0],
)
"""Decodes and prompts, continued or new, in place or not, and sequences that pad the batch."""

NUM_SLOTS = 10


def step_of(length: int, source: int, target: int) -> Step:
    """Return a step of one sequence."""
    return Step([length], [source], [target])

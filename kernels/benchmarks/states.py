"""Batches of sequences that keep a state, for the benchmarks of their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import Bench, Call, Work
from torch import Tensor

Make = Callable[[Bench, "StateBatch"], Call]


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The sequences of a step, with the same number of rows each."""

    num_seqs: int
    rows: int  # number of rows of each sequence

    @property
    def num_tokens(self) -> int:
        return self.num_seqs * self.rows

    @property
    def name(self) -> str:
        return f"{self.num_seqs}x{self.rows} rows"

    def step(self, bench: Bench) -> dict[str, Tensor]:
        """Return the slots, which are updated in place, and the rows of the sequences."""
        slot = torch.arange(1, self.num_seqs + 1, dtype=torch.int32, device=bench.device)
        starts = torch.arange(self.num_seqs + 1, dtype=torch.int32, device=bench.device)
        return {"slots": torch.stack((slot, slot), 1), "query_start_loc": starts * self.rows}

    def long_step(self, bench: Bench) -> dict[str, Any]:
        """Return the same for kernels with chunks. The texts begin with these rows."""
        seq_lens = torch.full((self.num_seqs,), self.rows, dtype=torch.int32, device=bench.device)
        num_decodes = self.num_seqs if self.rows == 1 else 0
        return {**self.step(bench), "seq_lens": seq_lens, "num_decodes": num_decodes}

    def pool(self, bench: Bench, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return states of zeros for all sequences, and slot 0."""
        return torch.zeros(self.num_seqs + 1, *sizes, dtype=dtype, device=bench.device)


def batches(bench: Bench) -> list[StateBatch]:
    """Return decodes and prompts, tiny ones in a quick run."""
    if bench.quick:
        return [StateBatch(2, 1), StateBatch(1, 70)]
    decodes = [StateBatch(num_seqs, 1) for num_seqs in (1, 16, 64, 256)]
    return [*decodes, StateBatch(8, 64), StateBatch(1, 2048), StateBatch(1, 8192)]


def time_batches(
    bench: Bench, name: str, make: Make, row_bytes: int, state_bytes: int, row_flops: int = 0
) -> None:
    """Time a kernel for all batches.

    Args:
        bench: the run.
        name: the kernel.
        make: returns a call for a batch, on memory that no other call accesses.
        row_bytes: bytes that are read and written for each row.
        state_bytes: bytes of a state, which is read and written once.
        row_flops: operations for each row, by the definition of the layer.
    """
    for batch in batches(bench):
        bench.warm_up(make(bench, batch))
        moved = batch.num_tokens * row_bytes + 2 * batch.num_seqs * state_bytes
        work = Work(bytes=moved, flops=batch.num_tokens * row_flops)
        bench.time(name, batch.name, work, partial(make, bench, batch))

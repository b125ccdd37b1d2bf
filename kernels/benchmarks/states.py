"""Batches of sequences that keep a state, for the benchmarks of their kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from measure import Bench, Call, Work
from torch import Tensor

Make = Callable[[Bench, "StateBatch"], Call]


@dataclass(frozen=True, slots=True)
class StateBatch:
    """Sequences of a step with the same number of rows each, and decodes before them."""

    num_alike: int
    rows: int  # number of rows of each of the sequences that are alike
    num_decodes: int = 0

    @property
    def num_seqs(self) -> int:
        return self.num_decodes + self.num_alike

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_alike * self.rows

    @property
    def name(self) -> str:
        alike = f"{self.num_alike}x{self.rows} rows"
        return f"{self.num_decodes} decodes, {alike}" if self.num_decodes else alike

    def lengths(self, bench: Bench) -> Tensor:
        """Return the number of rows of each sequence, int32."""
        each = [1] * self.num_decodes + [self.rows] * self.num_alike
        return torch.tensor(each, dtype=torch.int32, device=bench.device)

    def step(self, bench: Bench) -> dict[str, Tensor]:
        """Return the slots, which are updated in place, and the rows of the sequences."""
        slot = torch.arange(1, self.num_seqs + 1, dtype=torch.int32, device=bench.device)
        starts = torch.zeros(self.num_seqs + 1, dtype=torch.int32, device=bench.device)
        torch.cumsum(self.lengths(bench), 0, dtype=torch.int32, out=starts[1:])
        return {"slots": torch.stack((slot, slot), 1), "query_start_loc": starts}

    def long_step(self, bench: Bench, *, chunked: bool) -> dict[str, Any]:
        """Return the same for kernels with chunks, unless `chunked` is false.

        The texts begin with these rows.
        """
        if not chunked:
            return self.step(bench)
        num_decodes = self.num_seqs if self.rows == 1 else self.num_decodes
        return {**self.step(bench), "seq_lens": self.lengths(bench), "num_decodes": num_decodes}

    def pool(self, bench: Bench, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return states of zeros for all sequences, and slot 0."""
        return torch.zeros(self.num_seqs + 1, *sizes, dtype=dtype, device=bench.device)


def batches(bench: Bench) -> list[StateBatch]:
    """Return decodes, prompts, and both together, tiny ones in a quick run."""
    if bench.quick:
        return [StateBatch(2, 1), StateBatch(1, 70), StateBatch(1, 20, 2)]
    decodes = [StateBatch(num_seqs, 1) for num_seqs in (1, 16, 64, 256)]
    prompts = [StateBatch(8, 64), StateBatch(1, 2048), StateBatch(1, 8192)]
    return [*decodes, *prompts, StateBatch(1, 2048, 64)]


def prompts_one_by_one(bench: Bench) -> list[StateBatch]:
    """Return the prompts that show what chunks gain, for kernels that compute rows one by one."""
    return [StateBatch(1, 70)] if bench.quick else [StateBatch(8, 64), StateBatch(1, 2048)]


def time_batches(
    bench: Bench,
    name: str,
    make: Make,
    row_bytes: int,
    state_bytes: int,
    row_flops: int = 0,
    only: Sequence[StateBatch] | None = None,
) -> None:
    """Time a kernel for several batches.

    Args:
        bench: the run.
        name: the kernel.
        make: returns a call for a batch, on memory that no other call accesses.
        row_bytes: bytes that are read and written for each row.
        state_bytes: bytes of a state, which is read and written once.
        row_flops: operations for each row, by the definition of the layer.
        only: the batches; None for those of `batches`.
    """
    for batch in batches(bench) if only is None else only:
        bench.warm_up(make(bench, batch))
        moved = batch.num_tokens * row_bytes + 2 * batch.num_seqs * state_bytes
        work = Work(bytes=moved, flops=batch.num_tokens * row_flops)
        bench.time(name, batch.name, work, partial(make, bench, batch))

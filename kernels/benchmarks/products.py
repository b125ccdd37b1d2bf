"""Products with the weights of Llama-3-8B, and torch's product of the same shape in bfloat16."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from measure import Bench, Call, Work
from torch import Tensor

OUT_DTYPE = torch.bfloat16
_FEW_ROWS = 64  # up to here, reading the weights takes nearly all of the time

Shapes = dict[str, tuple[int, int]]
"""N and K of weights, by name."""

Make = Callable[[Bench, int, int, int], Call]
"""Returns a call for rows, N and K."""


def shapes(bench: Bench) -> Shapes:
    """Return N and K of the weights, tiny ones in a quick run."""
    if bench.quick:
        return {"tiny": (64, 128)}
    return {"qkv": (6144, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}


def integers(bench: Bench, *shape: int, dtype: torch.dtype = torch.int8) -> Tensor:
    """Return random numbers of all bits."""
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return torch.randint(low, high, shape, dtype=dtype, device=bench.device)


def linear(bench: Bench, rows: int, features: int, width: int) -> Call:
    """Return a call of torch's product."""
    return partial(F.linear, bench.random(rows, width), bench.random(features, width))


def warm_up(
    bench: Bench,
    *makers: Make,
    timed: Shapes | None = None,
    row_counts: Sequence[int] = (1, 256, 512),
) -> None:
    """Compile all that any number of rows needs, for all shapes or those of `timed`."""
    for make in makers:
        for features, width in (timed or shapes(bench)).values():
            for rows in bench.sizes(*row_counts):
                bench.warm_up(make(bench, rows, features, width))


def time_products(
    bench: Bench,
    name: str,
    make: Make,
    weight_bits: float = 16,
    x_bytes: int = 2,
    *,
    timed: Shapes | None = None,
    row_counts: Sequence[int] = (1, 16, 64, 256, 4096),
    outputs: float = 1,
) -> None:
    """Measure all shapes, or those of `timed`, with several numbers of rows.

    An element of a weight has `weight_bits`, scales included, and an element of a row has
    `x_bytes`. A row has `outputs` results for each feature.
    """
    for label, (features, width) in (timed or shapes(bench)).items():
        for rows in bench.sizes(*row_counts):
            moved = rows * (width * x_bytes + int(features * outputs) * OUT_DTYPE.itemsize)
            moved += int(features * width * weight_bits) // 8
            few = rows <= _FEW_ROWS
            work = Work(bytes=moved) if few else Work(flops=2 * rows * features * width)
            shape = f"{label} {rows}x{features}x{width}"
            bench.time(name, shape, work, partial(make, bench, rows, features, width))

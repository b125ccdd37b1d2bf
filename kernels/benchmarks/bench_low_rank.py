"""Benchmark of the products of low rank that 8 adapters of rank 16 add to Llama-3-8B's layers.

The ceiling reads the adapters that rows have once, reads the rows, and adds to the output. A row
`no adapters` is the time of launches for rows without adapters, which return at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.low_rank import expand, shrink
from torch import Tensor

_NUM_ADAPTERS, _RANK = 8, 16


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Sizes of a linear layer and of the layers that are fused in it."""

    name: str
    inputs: int
    parts: tuple[int, ...]


def layers(bench: Bench) -> list[LayerSizes]:
    """Return the layers of Llama-3-8B, a tiny one in a quick run."""
    if bench.quick:
        return [LayerSizes("tiny", 64, (40, 16))]
    return [
        LayerSizes("qkv", 4096, (4096, 1024, 1024)),
        LayerSizes("gate_up", 4096, (14336, 14336)),
        LayerSizes("down", 14336, (4096,)),
    ]


def slots(bench: Bench, rows: int) -> Tensor:
    """Return a slot for each row: neighbors share it if there are more rows than decodes."""
    length = max(rows // 64, 1)
    row = torch.arange(rows, dtype=torch.int32, device=bench.device)
    return row // length % _NUM_ADAPTERS


def call(bench: Bench, layer: LayerSizes, rows: int, slots: Tensor) -> Call:
    parts, outputs = len(layer.parts), sum(layer.parts)
    x, out = bench.random(rows, layer.inputs), bench.random(rows, outputs)
    a = bench.random(_NUM_ADAPTERS, parts, _RANK, layer.inputs)
    b = bench.random(_NUM_ADAPTERS, outputs, _RANK)
    ranks = torch.full((_NUM_ADAPTERS, parts), _RANK, dtype=torch.int32, device=bench.device)

    def add() -> None:
        expand(out, shrink(x, a, ranks, slots), b, ranks, slots, layer.parts)

    return add


def run(bench: Bench) -> None:
    for layer in layers(bench):
        parts, outputs = len(layer.parts), sum(layer.parts)
        for rows in bench.sizes(1, 16, 64, 256, 1024, 4096):
            of_rows = slots(bench, rows)
            bench.warm_up(call(bench, layer, rows, of_rows))
            num_used = min(rows, _NUM_ADAPTERS)
            weights = num_used * _RANK * (parts * layer.inputs + outputs)
            work = Work(bytes=2 * (weights + rows * (layer.inputs + 2 * outputs)))
            shape = f"{layer.name} {rows} rows, {num_used} adapters"
            bench.time("low_rank", shape, work, partial(call, bench, layer, rows, of_rows))
            if rows in bench.sizes(1, 64, 4096):
                none = torch.full_like(of_rows, -1)
                shape = f"{layer.name} {rows} rows, no adapters"
                only_slots = Work(bytes=none.nbytes)
                bench.time("low_rank", shape, only_slots, partial(call, bench, layer, rows, none))

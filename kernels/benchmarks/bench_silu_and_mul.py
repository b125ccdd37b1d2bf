"""Benchmark of the gated activation of Llama-3-8B's feed-forward layer."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.silu_and_mul import silu_and_mul

WIDTH = 14336


def activation(bench: Bench, rows: int) -> Call:
    gate_up = bench.random(rows, 2 * WIDTH)
    return partial(silu_and_mul, gate_up, torch.empty_like(gate_up[:, :WIDTH]).contiguous())


def run(bench: Bench) -> None:
    bench.warm_up(activation(bench, 1))
    for rows in bench.sizes(1, 64, 256, 8192):
        work = Work(bytes=3 * rows * WIDTH * torch.bfloat16.itemsize)
        bench.time("silu_and_mul", f"{rows}x{WIDTH}", work, partial(activation, bench, rows))

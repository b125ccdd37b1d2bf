"""Benchmark of the real-gated linear recurrent unit of RecurrentGemma-2B."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.rg_lru import rg_lru
from states import StateBatch, time_batches


def width(bench: Bench) -> int:
    """Return the number of channels, a tiny one in a quick run."""
    return 64 if bench.quick else 2560


def make(bench: Bench, batch: StateBatch) -> Call:
    x, gate, other = (bench.random(batch.num_tokens, width(bench)) for _ in range(3))
    parameter = bench.random(width(bench), dtype=torch.float32)
    pool = batch.pool(bench, width(bench))
    return partial(rg_lru, x, gate, other, parameter, pool, **batch.step(bench))


def run(bench: Bench) -> None:
    time_batches(bench, "rg_lru", make, 2 * 4 * width(bench), 4 * width(bench))

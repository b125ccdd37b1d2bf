"""Benchmark of the selective scan of Jamba-Mini, a Mamba."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.mamba1_scan import mamba1_scan
from states import StateBatch, time_batches


def sizes(bench: Bench) -> tuple[int, int]:
    """Return the channels and the numbers of a channel's state, tiny ones in a quick run."""
    return (32, 8) if bench.quick else (8192, 16)


def make(bench: Bench, batch: StateBatch) -> Call:
    inner, state_dim = sizes(bench)
    rows = batch.num_tokens
    x, dt = (bench.random(rows, inner) for _ in range(2))
    b, c = (bench.random(rows, state_dim) for _ in range(2))
    a = -torch.rand(inner, state_dim, device=bench.device)
    d, bias = (bench.random(inner, dtype=torch.float32) for _ in range(2))
    pool = batch.pool(bench, inner, state_dim)
    return partial(mamba1_scan, x, dt, a, b, c, d, bias, pool, **batch.step(bench))


def run(bench: Bench) -> None:
    inner, state_dim = sizes(bench)
    row_bytes = 2 * (3 * inner + 2 * state_dim)
    time_batches(bench, "mamba1_scan", make, row_bytes, 4 * inner * state_dim)

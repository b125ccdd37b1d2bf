"""Benchmark of the linear attention of MiniMax-Text-01."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.linear_attention import linear_attention
from states import StateBatch, time_batches


def sizes(bench: Bench) -> tuple[int, int]:
    """Return heads and their dimension, tiny ones in a quick run."""
    return (2, 16) if bench.quick else (64, 128)


def make(bench: Bench, batch: StateBatch) -> Call:
    heads, dim = sizes(bench)
    q, k, v = bench.random(batch.num_tokens, 3 * heads, dim).split(heads, dim=1)
    slopes = torch.rand(heads, device=bench.device)
    pool = batch.pool(bench, heads, dim, dim)
    return partial(linear_attention, q, k, v, slopes, pool, **batch.long_step(bench))


def run(bench: Bench) -> None:
    heads, dim = sizes(bench)
    state = heads * dim * dim
    time_batches(bench, "linear_attention", make, 2 * 4 * heads * dim, 4 * state, 4 * state)

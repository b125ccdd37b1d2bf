"""Benchmark of the selective scan of Nemotron-H-8B, a Mamba-2."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.selective_scan import selective_scan
from states import StateBatch, prompts_one_by_one, time_batches


def sizes(bench: Bench) -> tuple[int, int, int, int]:
    """Return heads, groups, head_dim and state_dim, tiny ones in a quick run."""
    return (2, 1, 16, 16) if bench.quick else (128, 8, 64, 128)


def make(bench: Bench, batch: StateBatch, *, chunked: bool = True) -> Call:
    heads, groups, head_dim, state_dim = sizes(bench)
    rows = batch.num_tokens
    x, dt = bench.random(rows, heads, head_dim), bench.random(rows, heads)
    b, c = (bench.random(rows, groups, state_dim) for _ in range(2))
    a = -torch.rand(heads, device=bench.device)
    d, bias = (bench.random(heads, dtype=torch.float32) for _ in range(2))
    pool = batch.pool(bench, heads, head_dim, state_dim)
    step = batch.long_step(bench, chunked=chunked)
    return partial(selective_scan, x, dt, a, b, c, d, bias, pool, **step)


def run(bench: Bench) -> None:
    heads, groups, head_dim, state_dim = sizes(bench)
    state = heads * head_dim * state_dim
    row_bytes = 2 * (2 * heads * head_dim + heads + 2 * groups * state_dim)
    work = row_bytes, 4 * state, 4 * state
    time_batches(bench, "selective_scan", make, *work)
    one_by_one, prompts = partial(make, chunked=False), prompts_one_by_one(bench)
    time_batches(bench, "selective_scan one by one", one_by_one, *work, prompts)

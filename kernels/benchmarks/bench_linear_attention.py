"""Benchmark of the linear attention of MiniMax-Text-01."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.linear_attention import linear_attention
from states import StateBatch, prompts_one_by_one, time_batches


def sizes(bench: Bench) -> tuple[int, int]:
    """Return heads and their dimension, tiny ones in a quick run."""
    return (2, 16) if bench.quick else (64, 128)


def make(bench: Bench, batch: StateBatch, *, chunked: bool = True) -> Call:
    heads, dim = sizes(bench)
    q, k, v = bench.random(batch.num_tokens, 3 * heads, dim).split(heads, dim=1)
    slopes = torch.rand(heads, device=bench.device)
    pool = batch.pool(bench, heads, dim, dim)
    step = batch.long_step(bench, chunked=chunked)
    return partial(linear_attention, q, k, v, slopes, pool, **step)


def run(bench: Bench) -> None:
    heads, dim = sizes(bench)
    state = heads * dim * dim
    work = 2 * 4 * heads * dim, 4 * state, 4 * state
    time_batches(bench, "linear_attention", make, *work)
    one_by_one, prompts = partial(make, chunked=False), prompts_one_by_one(bench)
    time_batches(bench, "linear_attention one by one", one_by_one, *work, prompts)

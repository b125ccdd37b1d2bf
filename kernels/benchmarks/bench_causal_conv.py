"""Benchmark of the causal convolutions of Qwen3-Next."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.causal_conv import causal_conv
from states import StateBatch, time_batches

WIDTH = 4


def make(bench: Bench, batch: StateBatch) -> Call:
    channels = 64 if bench.quick else 8192
    x, weight = bench.random(batch.num_tokens, channels), bench.random(channels, WIDTH)
    pool = batch.pool(bench, channels, WIDTH - 1, dtype=torch.bfloat16)
    return partial(causal_conv, x, weight, None, pool, silu=True, **batch.step(bench))


def run(bench: Bench) -> None:
    channels = 64 if bench.quick else 8192
    time_batches(bench, "causal_conv", make, 2 * 2 * channels, 2 * channels * (WIDTH - 1))

"""Benchmark of norms of Llama-3-8B's rows, with and without the residual stream."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.rms_norm import add_rms_norm, rms_norm

WIDTH = 4096
EPS = 1e-5


def norm(bench: Bench, rows: int) -> Call:
    x, weight = bench.random(rows, WIDTH), bench.random(WIDTH)
    return partial(rms_norm, x, weight, EPS, out=torch.empty_like(x))


def add_norm(bench: Bench, rows: int) -> Call:
    x, residual, weight = bench.random(rows, WIDTH), bench.random(rows, WIDTH), bench.random(WIDTH)
    return partial(add_rms_norm, x, residual, weight, EPS, out=x)


def run(bench: Bench) -> None:
    bench.warm_up(norm(bench, 1), add_norm(bench, 1))
    for name, make, passes in (("rms_norm", norm, 2), ("add_rms_norm", add_norm, 4)):
        for rows in bench.sizes(1, 64, 256, 8192):
            work = Work(bytes=(passes * rows + 1) * WIDTH * torch.bfloat16.itemsize)
            bench.time(name, f"{rows}x{WIDTH}", work, partial(make, bench, rows))

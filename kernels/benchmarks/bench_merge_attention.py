"""Benchmark of merging two attention results over different keys."""

from __future__ import annotations

from functools import partial

import torch
from attention import LLAMA_8B
from measure import Bench, Call, Work
from paged_kernels.merge_attention import merge_attention


def merge(bench: Bench, tokens: int) -> Call:
    rows = tokens, LLAMA_8B.queries
    first, second = (bench.random(*rows, LLAMA_8B.dim) for _ in range(2))
    lse = [bench.random(*rows, dtype=torch.float32) for _ in range(2)]
    out = torch.empty_like(first)
    return partial(merge_attention, first, lse[0], second, lse[1], out=out)


def run(bench: Bench) -> None:
    bench.warm_up(merge(bench, 1))
    for tokens in bench.sizes(1, 64, 256, 8192):
        rows = tokens * LLAMA_8B.queries
        work = Work(bytes=rows * (3 * LLAMA_8B.dim * torch.bfloat16.itemsize + 2 * 4))
        bench.time("merge_attention", f"{tokens} tokens", work, partial(merge, bench, tokens))

"""Benchmark of log-probabilities of sampled and top tokens, over Llama-3's vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.logprobs import logprobs

WIDTH = 20


def rate(bench: Bench, rows: int, wanted: int) -> Call:
    slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
    return partial(
        logprobs, bench.logits(rows), slots, slots, torch.full_like(slots, wanted), WIDTH
    )


def run(bench: Bench) -> None:
    bench.warm_up(rate(bench, 1, 0))
    for rows in bench.sizes(1, 64, 256):
        work = Work(bytes=rows * bench.vocab_size * torch.float32.itemsize)
        for wanted in (0, 5, WIDTH):
            make = partial(rate, bench, rows, wanted)
            name = f"logprobs, {wanted} likeliest"
            bench.time(name, f"{rows} rows", work, make, dtype=torch.float32)

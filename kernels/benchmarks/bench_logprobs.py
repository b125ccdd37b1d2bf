"""Benchmark of log-probabilities of sampled and top tokens, over Llama-3's vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, Work, main
from paged_kernels.logprobs import logprobs

VOCAB = 128256
WIDTH = 20


def rate(bench: Bench, rows: int, wanted: int) -> Call:
    slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
    logits = 3 * bench.random(rows, _vocab(bench), dtype=torch.float32)  # with some likely tokens
    return partial(logprobs, logits, slots, slots, torch.full_like(slots, wanted), WIDTH)


def run(bench: Bench) -> None:
    bench.warm_up(rate(bench, 1, 0))
    for rows in bench.sizes(1, 64, 256):
        work = Work(bytes=rows * _vocab(bench) * torch.float32.itemsize)
        for wanted in (0, 5, WIDTH):
            make = partial(rate, bench, rows, wanted)
            name = f"logprobs, {wanted} likeliest"
            bench.time(name, f"{rows} rows", work, make, dtype=torch.float32)


def _vocab(bench: Bench) -> int:
    return 1000 if bench.quick else VOCAB


if __name__ == "__main__":
    main(run)

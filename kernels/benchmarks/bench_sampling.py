"""Benchmark of sampling tokens from logits over Llama-3's vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.sampling import SamplingState, sample

FILTERS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "plain": (1.0, 0, 1.0, 0.0),
    "top-k 50, top-p 0.9": (0.8, 50, 0.9, 0.0),
    "top-p 0.95": (0.7, 0, 0.95, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
}


def draw(bench: Bench, rows: int, filters: str, dtype: torch.dtype) -> Call:
    temperature, top_k, top_p, min_p = FILTERS[filters]
    slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
    columns = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    state = SamplingState(
        **{
            name: torch.full((rows,), value, device=bench.device) for name, value in columns.items()
        },
        top_k=torch.full((rows,), top_k, dtype=torch.int32, device=bench.device),
        seed=torch.arange(rows, device=bench.device),
    )
    logits = bench.logits(rows, dtype)
    return partial(sample, logits, slots, slots, state, torch.empty_like(slots))


def run(bench: Bench) -> None:
    # Logits come in the model's dtype; those that a request has changed are float32.
    for dtype in (torch.bfloat16, torch.float32):
        bench.warm_up(draw(bench, 1, "greedy", dtype))
        for rows in bench.sizes(1, 64, 256):
            work = Work(bytes=rows * bench.vocab_size * dtype.itemsize)
            for filters in FILTERS:
                make = partial(draw, bench, rows, filters, dtype)
                bench.time(f"sample {filters}", f"{rows} rows", work, make, dtype=dtype)

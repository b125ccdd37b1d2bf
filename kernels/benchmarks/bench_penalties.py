"""Benchmark of logit penalties over Llama-3's vocabulary, and of the token counts they need."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.penalties import Penalties, apply_penalties, count_tokens
from torch import Tensor

SEEN = 1000  # maximum number of distinct tokens in a sequence
STOPS = 4
_FLOAT, _INT = torch.float32.itemsize, torch.int32.itemsize


def counts(bench: Bench, rows: int) -> Tensor:
    """Return the token counts of sequences of `SEEN` tokens."""
    table = torch.zeros(rows, bench.vocab_size, dtype=torch.int32, device=bench.device)
    tokens = torch.randint(bench.vocab_size, (rows, SEEN), device=bench.device)
    return table.scatter_(1, tokens, 2)


def penalize(bench: Bench, rows: int, strength: float) -> Call:
    """Return a penalizing call; with `strength` 0 no penalty applies, as for most sequences."""
    slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
    strengths = torch.full((rows,), strength, device=bench.device)
    stops = torch.arange(rows * STOPS, dtype=torch.int32, device=bench.device).view(rows, STOPS)
    penalties = Penalties(1 + strengths, strengths, strengths, torch.zeros_like(slots), stops)
    logits = bench.logits(rows)
    inputs = slots.long()
    return partial(apply_penalties, logits, slots, slots, inputs, counts(bench, rows), penalties)


def count(bench: Bench, rows: int) -> Call:
    slots = torch.arange(rows, dtype=torch.int32, device=bench.device)
    return partial(count_tokens, counts(bench, rows), slots, slots, slots.long())


def run(bench: Bench) -> None:
    bench.warm_up(penalize(bench, 1, 0.1), count(bench, 1))
    for rows in bench.sizes(1, 64, 256):
        shape = f"{rows} rows"
        none = Work(bytes=rows * (4 * _INT + 3 * _FLOAT))  # the parameters of a row's slot
        full = Work(bytes=rows * (bench.vocab_size * _INT + 2 * SEEN * _FLOAT))
        counted = Work(bytes=rows * 4 * _INT)  # slot, token, and a count read and written
        for name, work, make in (
            ("apply_penalties, none", none, partial(penalize, bench, rows, 0.0)),
            ("apply_penalties", full, partial(penalize, bench, rows, 0.1)),
            ("count_tokens", counted, partial(count, bench, rows)),
        ):
            bench.time(name, shape, work, make, dtype=torch.float32)

"""Benchmark of masks of allowed tokens over Llama-3's vocabulary."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.token_masks import apply_token_masks

_INT, _FLOAT = torch.int32.itemsize, torch.float32.itemsize
ALLOWED = {"none": 0, "all": -1}  # every word of a mask


def mask(bench: Bench, rows: int, word: int) -> Call:
    """Return a call that masks every row."""
    words = -(-bench.vocab_size // 32)
    masks = torch.full((rows, words), word, dtype=torch.int32, device=bench.device)
    indices = torch.arange(rows, dtype=torch.int32, device=bench.device)
    return partial(apply_token_masks, bench.logits(rows), indices, masks)


def run(bench: Bench) -> None:
    bench.warm_up(mask(bench, 1, 0))
    for rows in bench.sizes(1, 16, 64, 256):
        for name, word in ALLOWED.items():
            read = _INT + bench.vocab_size // 8  # a row's number and its mask
            work = Work(bytes=rows * (read + (0 if word else bench.vocab_size * _FLOAT)))
            make = partial(mask, bench, rows, word)
            name = f"apply_token_masks, {name} allowed"
            bench.time(name, f"{rows} rows", work, make, dtype=torch.float32)

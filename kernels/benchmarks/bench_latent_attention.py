"""Benchmark of latent attention with DeepSeek-V3's sizes: decodes, prompts and writes.

Decodes of 16 heads are those of DeepSeek-V2-Lite, and of one of eight ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from unittest.mock import patch

import paged_kernels.latent_attention as kernel
import torch
from measure import Bench, Call, Work, descend
from paged_kernels.latent_attention import latent_attention, plan_latent
from paged_kernels.latent_rope_cache import latent_rope_cache
from paged_kernels.tuning.latent import LatentConfig, latent_config
from torch import Tensor

BLOCK_SIZE = 16
KIB = 1024
ITEM = 2  # bytes of a bf16 number
DECODES = {
    "1x8k": [8 * KIB],
    "32x1k": [KIB] * 32,
    "32x8k": [8 * KIB] * 32,
    "128x4k": [4 * KIB] * 128,
}
FEW_HEADS = 16
CHOICES = {
    "rows": (16, 32, 64),
    "tile": (16, 32, 64, 128),
    "num_warps": (4, 8, 16),
    "num_stages": (1, 2, 3),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a layer, and sequences of a step: their numbers of queries and of rows."""

    queries: Sequence[int]
    rows: Sequence[int]
    heads: int = 128
    rank: int = 512
    rotary: int = 64

    @property
    def row_size(self) -> int:
        """The numbers of a row."""
        return self.rank + self.rotary

    @property
    def work(self) -> Work:
        """The work of a layer: bytes for sequences with one query, flops for all others."""
        num_bytes, pairs = 0, 0
        for queries, rows in zip(self.queries, self.rows, strict=True):
            if queries == 1:
                num_bytes += ITEM * (rows + self.heads) * self.row_size
                num_bytes += ITEM * self.heads * self.rank
            else:  # each query sees the rows up to its own position
                pairs += queries * rows - queries * (queries - 1) // 2
        return Work(num_bytes, 2 * pairs * self.heads * (self.row_size + self.rank))


def sizes_of(bench: Bench, queries: Sequence[int], rows: Sequence[int], heads: int = 128) -> Sizes:
    """Return the sizes, or tiny ones for a quick run."""
    if bench.quick:
        return Sizes([min(count, 3) for count in queries[:2]], [5 for _ in rows[:2]], 4, 32, 8)
    return Sizes(queries, rows, heads)


def make_call(bench: Bench, sizes: Sizes) -> Call:
    """Return attention of one layer over scattered blocks, planned beforehand."""
    counts = [-(-rows // BLOCK_SIZE) for rows in sizes.rows]
    table = torch.zeros(len(counts), max(counts), dtype=torch.int32)
    ids = torch.randperm(sum(counts), dtype=torch.int32)
    for seq, part in enumerate(torch.split(ids, counts)):
        table[seq, : len(part)] = part
    q = bench.random(sum(sizes.queries), sizes.heads, sizes.row_size)
    cache = bench.random(sum(counts), BLOCK_SIZE, sizes.row_size)
    lengths = ints(bench, sizes.rows), ints(bench, [0, *accumulate(sizes.queries)])
    num_decodes = len(counts) if max(sizes.queries) == 1 else 0
    options = {"rank": sizes.rank, "num_decodes": num_decodes}
    plan = plan_latent(q, cache, *lengths, rank=sizes.rank, num_decodes=num_decodes)
    table = table.to(bench.device)
    return partial(latent_attention, q, cache, table, *lengths, scale=0.07, plan=plan, **options)


def make_write(bench: Bench, tokens: int, sizes: Sizes) -> Call:
    """Return the write of the rows of some tokens, to slots of their own."""
    blocks = -(-tokens // BLOCK_SIZE)
    return partial(
        latent_rope_cache,
        bench.random(tokens, sizes.heads, sizes.row_size),
        bench.random(tokens, sizes.row_size),
        ints(bench, range(tokens)),
        bench.random(tokens, sizes.rotary, dtype=torch.float32),
        bench.random(blocks, BLOCK_SIZE, sizes.row_size),
        torch.arange(tokens, device=bench.device),
    )


def ints(bench: Bench, values: Sequence[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=bench.device)


def run(bench: Bench) -> None:
    for heads in (128, FEW_HEADS):
        for shape, rows in DECODES.items():
            sizes = sizes_of(bench, [1] * len(rows), rows, heads)
            bench.warm_up(make_call(bench, sizes))
            label = f"{shape}, {heads} heads"
            bench.time("latent decode", label, sizes.work, partial(make_call, bench, sizes))
    for shape, rows in {"1x2k": [2 * KIB], "1x8k": [8 * KIB]}.items():
        sizes = sizes_of(bench, rows, rows)
        bench.warm_up(make_call(bench, sizes))
        bench.time("latent prefill", shape, sizes.work, partial(make_call, bench, sizes))
    for tokens in bench.sizes(64, 8192):
        sizes = sizes_of(bench, [1], [1])
        work = Work(bytes=ITEM * tokens * (2 * sizes.heads * sizes.rotary + 2 * sizes.row_size))
        make = partial(make_write, bench, tokens, sizes)
        bench.warm_up(make())
        bench.time("latent_rope_cache", str(tokens), work, make)


def sweep(bench: Bench) -> None:
    """Search for launch configurations of decodes and of a prompt, and print the best ones."""
    batches = {"1x8k": ([1], [8 * KIB]), "32x8k": ([1] * 32, [8 * KIB] * 32)}
    batches["prompt of 2k"] = [2 * KIB], [2 * KIB]
    for heads in (128, FEW_HEADS):
        for shape, (queries, rows) in batches.items():
            search(bench, f"{shape}, {heads} heads", sizes_of(bench, queries, rows, heads))


def search(bench: Bench, label: str, sizes: Sizes) -> None:
    def cost(config: LatentConfig) -> float:
        with patch.object(kernel, "latent_config", lambda *_: config):
            try:
                return bench.clock.microseconds([make_call(bench, sizes) for _ in range(4)])
            except Exception as error:  # too many registers, too much shared memory
                print(f"  {config}: {type(error).__name__}", flush=True)
                return float("inf")

    asked: list[LatentConfig] = []

    def noted(*arguments: int) -> LatentConfig:
        asked.append(latent_config(*arguments))
        return asked[-1]

    with patch.object(kernel, "latent_config", noted):
        make_call(bench, sizes)
    start = asked[-1]
    best, microseconds = descend(start, CHOICES, cost)
    print(f"{label}: {cost(start):.2f} us by {start}")
    print(f"{label}: {microseconds:.2f} us by {best}", flush=True)

"""Benchmark of the choice of 8 of 128 experts, compared with torch's softmax and top-k."""

from __future__ import annotations

from functools import partial

from measure import Bench, Call, Work
from paged_kernels.choose_experts import choose_experts
from torch import Tensor

EXPERTS, TOP_K = 128, 8


def with_torch(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Choose experts with one launch for each operation."""
    weights, ids = logits.float().softmax(dim=-1).topk(TOP_K, dim=-1)
    return ids.int(), weights / weights.sum(dim=-1, keepdim=True)


def ours(bench: Bench, rows: int) -> Call:
    return partial(choose_experts, bench.random(rows, EXPERTS), TOP_K, normalize=True)


def peer(bench: Bench, rows: int) -> Call:
    return partial(with_torch, bench.random(rows, EXPERTS))


def run(bench: Bench) -> None:
    bench.warm_up(ours(bench, 1))
    for rows in bench.sizes(1, 64, 256, 8192):
        work = Work(bytes=rows * (2 * EXPERTS + 8 * TOP_K))
        shape = f"{rows}x{EXPERTS}"
        bench.time("choose_experts", shape, work, partial(ours, bench, rows))
        bench.time("softmax and topk, torch", shape, work, partial(peer, bench, rows))

"""Benchmark of the experts of a mixture, with random choices.

Few rows must read the weights of the chosen experts once; many rows must multiply with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.experts import experts
from torch import Tensor

_FEW_ROWS = 64  # up to here, reading the weights takes nearly all of the time


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """Sizes of the experts of a layer."""

    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def weights(self) -> int:
        """The number of weights of one expert."""
        return 3 * self.hidden * self.intermediate


def models(bench: Bench) -> list[ExpertSizes]:
    """Return the shapes of known models, a tiny one in a quick run."""
    if bench.quick:
        return [ExpertSizes("tiny", 4, 2, 64, 32)]
    return [
        ExpertSizes("Mixtral-8x7B", 8, 2, 4096, 14336),
        ExpertSizes("Qwen3-30B-A3B", 128, 8, 2048, 768),
        ExpertSizes("gpt-oss-20b", 32, 4, 2880, 2880),
    ]


def chosen_experts(model: ExpertSizes, rows: int) -> Tensor:
    """Return random ids [rows, top_k] int32, the same ones in each call."""
    generator = torch.Generator().manual_seed(rows)
    order = torch.rand(rows, model.num_experts, generator=generator).argsort(dim=1)
    return order[:, : model.top_k].int()


def call(bench: Bench, model: ExpertSizes, rows: int) -> Call:
    ids = chosen_experts(model, rows).contiguous().to(bench.device)
    return partial(
        experts,
        bench.random(rows, model.hidden),
        bench.random(model.num_experts, 2 * model.intermediate, model.hidden),
        bench.random(model.num_experts, model.hidden, model.intermediate),
        ids,
        torch.full(ids.shape, 1 / model.top_k, device=bench.device),
    )


def run(bench: Bench) -> None:
    for model in models(bench):
        for rows in bench.sizes(1, 16, 64, 256, 4096):
            bench.warm_up(call(bench, model, rows))
            num_chosen = len(chosen_experts(model, rows).unique())
            moved = (num_chosen * model.weights + 2 * rows * model.hidden) * 2
            flops = 2 * rows * model.top_k * model.weights
            work = Work(bytes=moved) if rows <= _FEW_ROWS else Work(flops=flops)
            shape = f"{model.name} {rows} rows, {num_chosen} experts"
            bench.time("experts", shape, work, partial(call, bench, model, rows))

"""Benchmark of 16-bit products for few rows, with and without SiLU, compared with torch's."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from measure import Bench, Call, main
from paged_kernels.dense_matmul import dense_matmul, dense_matmul_silu_and_mul
from paged_kernels.silu_and_mul import silu_and_mul
from products import Shapes, linear, shapes, time_products, warm_up
from torch import Tensor


def weights(bench: Bench) -> Shapes:
    """Return N and K of all weights that every step reads."""
    others = {} if bench.quick else {"o": (4096, 4096), "lm_head": (128256, 4096)}
    return shapes(bench) | others


def gated_weights(bench: Bench) -> Shapes:
    """Return N and K of the weights of gate and up."""
    return {name: shape for name, shape in shapes(bench).items() if name in ("tiny", "gate_up")}


def product(bench: Bench, rows: int, features: int, width: int) -> Call:
    return partial(dense_matmul, bench.random(rows, width), bench.random(features, width))


def gated(bench: Bench, rows: int, features: int, width: int) -> Call:
    x, gate_up = bench.random(rows, width), bench.random(features, width)
    return partial(dense_matmul_silu_and_mul, x, gate_up)


def two_launches(bench: Bench, rows: int, features: int, width: int) -> Call:
    """Return a call of torch's product and of the kernel of the activation."""
    x, gate_up = bench.random(rows, width), bench.random(features, width)

    def call() -> Tensor:
        return silu_and_mul(F.linear(x, gate_up))

    return call


def run(bench: Bench) -> None:
    plain, halves = weights(bench), gated_weights(bench)
    warm_up(bench, product, linear, timed=plain, row_counts=(1, 64))
    warm_up(bench, gated, two_launches, timed=halves, row_counts=(1, 64))
    few = partial(time_products, bench, row_counts=(1, 8, 16, 64))
    few("dense_matmul", product, timed=plain)
    few("F.linear", linear, timed=plain)
    few("dense_matmul_silu_and_mul", gated, timed=halves, outputs=0.5)
    few("F.linear, silu_and_mul", two_launches, timed=halves, outputs=0.5)


if __name__ == "__main__":
    main(run)

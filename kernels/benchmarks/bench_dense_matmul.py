"""Benchmark of 16-bit products for few rows, with and without SiLU, compared with torch's."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from measure import Bench, Call, Work, main
from paged_kernels.dense_matmul import dense_matmul, dense_matmul_silu_and_mul
from paged_kernels.silu_and_mul import silu_and_mul
from products import OUT_DTYPE, Make, linear, shapes
from torch import Tensor


def weights(bench: Bench) -> dict[str, tuple[int, int]]:
    """Return N and K of all weights that every step reads."""
    others = {} if bench.quick else {"o": (4096, 4096), "lm_head": (128256, 4096)}
    return shapes(bench) | others


def gated_weights(bench: Bench) -> dict[str, tuple[int, int]]:
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


def time_all(
    bench: Bench, name: str, make: Make, timed: dict[str, tuple[int, int]], outputs: float
) -> None:
    """Measure few rows; `outputs` is the number of results for each feature of a row."""
    for label, (features, width) in timed.items():
        for rows in bench.sizes(1, 8, 16, 64):
            numbers = features * width + rows * (width + int(features * outputs))
            shape = f"{label} {rows}x{features}x{width}"
            work = Work(bytes=numbers * OUT_DTYPE.itemsize)
            bench.time(name, shape, work, partial(make, bench, rows, features, width))


def run(bench: Bench) -> None:
    plain, halves = weights(bench), gated_weights(bench)
    for timed, makers in ((plain, (product, linear)), (halves, (gated, two_launches))):
        for features, width in timed.values():
            for rows in bench.sizes(1, 64):
                for make in makers:
                    bench.warm_up(make(bench, rows, features, width))
    time_all(bench, "dense_matmul", product, plain, 1)
    time_all(bench, "F.linear", linear, plain, 1)
    time_all(bench, "dense_matmul_silu_and_mul", gated, halves, 0.5)
    time_all(bench, "F.linear, silu_and_mul", two_launches, halves, 0.5)


if __name__ == "__main__":
    main(run)

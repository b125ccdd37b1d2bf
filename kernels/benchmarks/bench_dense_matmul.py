"""Benchmark of products of 16-bit numbers for few rows beside torch's, with and without SiLU."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from measure import Bench, Call, Work, main
from paged_kernels.dense_matmul import dense_matmul, dense_matmul_silu_and_mul
from paged_kernels.silu_and_mul import silu_and_mul
from products import OUT_DTYPE, Make, linear
from torch import Tensor


def shapes(bench: Bench) -> dict[str, tuple[int, int]]:
    """Return N and K of the weights of Llama-3-8B, tiny ones in a quick run."""
    if bench.quick:
        return {"tiny": (64, 128)}
    return {
        "qkv": (6144, 4096),
        "o": (4096, 4096),
        "gate_up": (28672, 4096),
        "down": (4096, 14336),
        "lm_head": (128256, 4096),
    }


def gated_shapes(bench: Bench) -> dict[str, tuple[int, int]]:
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
    bench: Bench, name: str, make: Make, weights: dict[str, tuple[int, int]], outputs: float
) -> None:
    """Measure few rows; `outputs` is the number of results for each feature of a row."""
    for label, (features, width) in weights.items():
        for rows in bench.sizes(1, 8, 16, 64):
            numbers = features * width + rows * (width + int(features * outputs))
            shape = f"{label} {rows}x{features}x{width}"
            work = Work(bytes=numbers * OUT_DTYPE.itemsize)
            bench.time(name, shape, work, partial(make, bench, rows, features, width))


def run(bench: Bench) -> None:
    for weights, makers in (
        (shapes(bench), (product, linear)),
        (gated_shapes(bench), (gated, two_launches)),
    ):
        for features, width in weights.values():
            for rows in bench.sizes(1, 64):
                for make in makers:
                    bench.warm_up(make(bench, rows, features, width))
    time_all(bench, "dense_matmul", product, shapes(bench), 1)
    time_all(bench, "F.linear", linear, shapes(bench), 1)
    time_all(bench, "dense_matmul_silu_and_mul", gated, gated_shapes(bench), 0.5)
    time_all(bench, "F.linear, silu_and_mul", two_launches, gated_shapes(bench), 0.5)


if __name__ == "__main__":
    main(run)

"""Benchmark of 16-bit products for few rows, with and without SiLU, compared with torch's.

On a GPU it writes `kernels/paged_kernels/dense_table.json`: up to how many rows our product is the
faster one, for each of the shapes.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from measure import Bench, Call, Work
from paged_kernels.dense_matmul import dense_matmul, dense_matmul_silu_and_mul, num_arrivals
from paged_kernels.dense_table import DenseEntry, write_entries
from paged_kernels.silu_and_mul import silu_and_mul
from products import OUT_DTYPE, Make, Shapes, linear, warm_up
from torch import Tensor

ROWS = (1, 8, 16, 32, 64)
# N and K of the weights that every step reads.
PLAIN: Shapes = {
    "Llama-3-8B qkv": (6144, 4096),
    "Llama-3-8B o": (4096, 4096),
    "Llama-3-8B down": (4096, 14336),
    "Llama-3-8B lm_head": (128256, 4096),
    "Qwen3-8B down": (4096, 12288),
    "Qwen3-8B lm_head": (151936, 4096),
    "Qwen2.5-7B qkv": (4608, 3584),
    "Qwen2.5-7B o": (3584, 3584),
    "Qwen2.5-7B down": (3584, 18944),
    "Qwen2.5-7B lm_head": (152064, 3584),
    "Llama-3.2-3B qkv": (5120, 3072),
    "Llama-3.2-3B o": (3072, 3072),
    "Llama-3.2-3B down": (3072, 8192),
    "Llama-3.2-3B lm_head": (128256, 3072),
}
GATED: Shapes = {
    "Llama-3-8B gate_up": (28672, 4096),
    "Qwen3-8B gate_up": (24576, 4096),
    "Qwen2.5-7B gate_up": (37888, 3584),
    "Llama-3.2-3B gate_up": (16384, 3072),
}
TINY: Shapes = {"tiny": (64, 1024)}


def product(bench: Bench, rows: int, features: int, width: int) -> Call:
    """Return a call of our product."""
    counters = torch.zeros(num_arrivals(features), dtype=torch.int32, device=bench.device)
    x, w = bench.random(rows, width), bench.random(features, width)
    return partial(dense_matmul, x, w, arrivals=counters)


def gated(bench: Bench, rows: int, features: int, width: int) -> Call:
    """Return a call of our product with the activation."""
    x, gate_up = bench.random(rows, width), bench.random(features, width)
    return partial(dense_matmul_silu_and_mul, x, gate_up)


def two_launches(bench: Bench, rows: int, features: int, width: int) -> Call:
    """Return a call of torch's product and of the kernel of the activation."""
    x, gate_up = bench.random(rows, width), bench.random(features, width)

    def call() -> Tensor:
        return silu_and_mul(F.linear(x, gate_up))

    return call


def compare(
    bench: Bench,
    label: str,
    shape: tuple[int, int],
    ours: tuple[str, Make],
    other: tuple[str, Make],
) -> int:
    """Time both products in turn, twice; return the rows up to which ours is never slower."""
    features, width = shape
    most, leads = 0, True
    for rows in bench.sizes(*ROWS):
        work = Work(bytes=(features * width + rows * (features + width)) * OUT_DTYPE.itemsize)
        case = f"{label} {rows}x{features}x{width}"
        best_us: dict[str, float] = {}
        for name, make in (ours, other, ours, other):
            row = bench.time(name, case, work, partial(make, bench, rows, features, width))
            best_us[name] = min(row.microseconds, best_us.get(name, row.microseconds))
        leads = leads and best_us[ours[0]] <= best_us[other[0]]
        most = rows if leads else most
    return most


def run(bench: Bench) -> None:
    plain, halves = (TINY, TINY) if bench.quick else (PLAIN, GATED)
    warm_up(bench, product, linear, timed=plain, row_counts=(1, 64))
    warm_up(bench, gated, two_launches, timed=halves, row_counts=(1, 64))
    pairs = {
        False: (("dense_matmul", product), ("F.linear", linear)),
        True: (("dense_matmul_silu_and_mul", gated), ("F.linear, silu_and_mul", two_launches)),
    }
    for has_gate, shapes in ((False, plain), (True, halves)):
        for label, shape in shapes.items():
            most = compare(bench, label, shape, *pairs[has_gate])
            if bench.device.type == "cuda" and not bench.quick:
                device = torch.cuda.get_device_name(bench.device)
                write_entries([DenseEntry(device, *shape, has_gate, most)])

"""Benchmark of products with 4-bit weights in groups of 128 beside torch's in bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, main
from paged_kernels.int4 import PER_WORD
from paged_kernels.w4a16_matmul import w4a16_matmul
from products import integers, linear, time_products, warm_up

GROUP_SIZE = 128


def product(bench: Bench, rows: int, features: int, width: int) -> Call:
    packed = integers(bench, features, width // PER_WORD, dtype=torch.int32)
    scales = bench.random(features, width // GROUP_SIZE)
    x = bench.random(rows, width)
    return partial(w4a16_matmul, x, packed, scales, group_size=GROUP_SIZE)


def run(bench: Bench) -> None:
    warm_up(bench, product, linear)
    bits = 4 + 16 / GROUP_SIZE
    time_products(bench, "w4a16_matmul", product, weight_bits=bits, x_bytes=2)
    time_products(bench, "F.linear, bfloat16", linear, weight_bits=16, x_bytes=2)


if __name__ == "__main__":
    main(run)

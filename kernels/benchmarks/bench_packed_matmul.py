"""Benchmark of products with packed weights of 4 and 8 bits, compared with torch's in bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.int4 import PER_WORD
from paged_kernels.w4a16_matmul import w4a16_matmul
from paged_kernels.w8a16_matmul import w8a16_matmul
from products import integers, linear, time_products, warm_up

GROUP_SIZE = 128


def int4(bench: Bench, rows: int, features: int, width: int) -> Call:
    packed = integers(bench, features, width // PER_WORD, dtype=torch.int32)
    scales = bench.random(features, width // GROUP_SIZE)
    x = bench.random(rows, width)
    return partial(w4a16_matmul, x, packed, scales, group_size=GROUP_SIZE)


def int8(bench: Bench, rows: int, features: int, width: int) -> Call:
    packed = integers(bench, features, width // 4, dtype=torch.int32)
    scales = bench.random(features, width // GROUP_SIZE)
    x = bench.random(rows, width)
    return partial(w8a16_matmul, x, packed, scales, group_size=GROUP_SIZE)


def float8(bench: Bench, rows: int, features: int, width: int) -> Call:
    packed = integers(bench, features, width // 4, dtype=torch.int32)
    x = bench.random(rows, width)
    return partial(w8a16_matmul, x, packed, bench.random(features, 1), group_size=-1, float8=True)


def run(bench: Bench) -> None:
    warm_up(bench, int4, int8, float8, linear)
    scale_bits = 16 / GROUP_SIZE
    time_products(bench, "w4a16_matmul", int4, weight_bits=4 + scale_bits, x_bytes=2)
    time_products(bench, "w8a16_matmul", int8, weight_bits=8 + scale_bits, x_bytes=2)
    time_products(bench, "w8a16_matmul, fp8", float8, weight_bits=8, x_bytes=2)
    time_products(bench, "F.linear, bfloat16", linear)

"""Benchmark of products with packed weights of 4 and 8 bits, compared with torch's in bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.packed_words import num_words
from paged_kernels.w4a16_matmul import w4a16_matmul
from paged_kernels.w8a16_matmul import w8a16_matmul
from products import integers, linear, time_products, warm_up

GROUP_SIZE, SMALL_GROUP = 128, 32


def int4(bench: Bench, rows: int, features: int, width: int, group_size: int = GROUP_SIZE) -> Call:
    packed = integers(bench, features, num_words(width, 4), dtype=torch.int32)
    scales = bench.random(features, width // group_size)
    x = bench.random(rows, width)
    return partial(w4a16_matmul, x, packed, scales, group_size=group_size)


def int8(bench: Bench, rows: int, features: int, width: int) -> Call:
    packed = integers(bench, features, num_words(width, 8), dtype=torch.int32)
    scales = bench.random(features, width // GROUP_SIZE)
    x = bench.random(rows, width)
    return partial(w8a16_matmul, x, packed, scales, group_size=GROUP_SIZE)


def float8(bench: Bench, rows: int, features: int, width: int) -> Call:
    packed = integers(bench, features, num_words(width, 8), dtype=torch.int32)
    x = bench.random(rows, width)
    return partial(w8a16_matmul, x, packed, bench.random(features, 1), group_size=-1, float8=True)


def run(bench: Bench) -> None:
    small = partial(int4, group_size=SMALL_GROUP)  # as with --quantization int4
    warm_up(bench, int4, small, int8, float8, linear)
    scale_bits = 16 / GROUP_SIZE
    time_products(bench, "w4a16_matmul", int4, weight_bits=4 + scale_bits, x_bytes=2)
    small_bits = 4 + 16 / SMALL_GROUP
    time_products(bench, "w4a16_matmul, groups of 32", small, weight_bits=small_bits, x_bytes=2)
    time_products(bench, "w8a16_matmul", int8, weight_bits=8 + scale_bits, x_bytes=2)
    time_products(bench, "w8a16_matmul, fp8", float8, weight_bits=8, x_bytes=2)
    time_products(bench, "F.linear, bfloat16", linear)

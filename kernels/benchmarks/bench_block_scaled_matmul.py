"""Benchmark of products of FP8 with scales for blocks, compared with torch's in bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.block_scaled_matmul import BLOCK_SIZE, block_scaled_matmul
from products import OUT_DTYPE, linear, time_products, warm_up

QUANTIZED = torch.float8_e4m3fn


def product(bench: Bench, rows: int, features: int, width: int) -> Call:
    x, w = (bench.random(count, width).to(QUANTIZED) for count in (rows, features))
    blocks = width // BLOCK_SIZE
    x_scales = bench.random(rows, blocks, dtype=torch.float32)
    w_scales = bench.random(-(-features // BLOCK_SIZE), blocks, dtype=torch.float32)
    return partial(block_scaled_matmul, x, x_scales, w, w_scales, out_dtype=OUT_DTYPE)


def run(bench: Bench) -> None:
    warm_up(bench, product, linear)
    time_products(bench, "block_scaled_matmul", product, weight_bits=8, x_bytes=1)
    time_products(bench, "F.linear, bfloat16", linear)

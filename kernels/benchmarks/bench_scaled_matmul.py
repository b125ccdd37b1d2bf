"""Benchmark of products of int8 and FP8, compared with torch's in bfloat16."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call
from paged_kernels.scaled_matmul import scaled_matmul
from products import OUT_DTYPE, integers, linear, time_products, warm_up

QUANTIZED = torch.float8_e4m3fn


def product(dtype: torch.dtype, bench: Bench, rows: int, features: int, width: int) -> Call:
    """Return a call with int8 or FP8."""
    if dtype == torch.int8:
        x, w = integers(bench, rows, width), integers(bench, features, width)
    else:
        x, w = (bench.random(count, width).to(dtype) for count in (rows, features))
    x_scales, w_scales = (bench.random(count, dtype=torch.float32) for count in (rows, features))
    return partial(scaled_matmul, x, x_scales, w, w_scales, out_dtype=OUT_DTYPE)


def run(bench: Bench) -> None:
    int8, fp8 = partial(product, torch.int8), partial(product, QUANTIZED)
    warm_up(bench, int8, fp8, linear)
    time_products(bench, "scaled_matmul, int8", int8, weight_bits=8, x_bytes=1)
    time_products(bench, "scaled_matmul, fp8", fp8, weight_bits=8, x_bytes=1)
    time_products(bench, "F.linear, bfloat16", linear)

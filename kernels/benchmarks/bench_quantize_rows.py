"""Benchmark of the quantization of Llama-3-8B's activations."""

from __future__ import annotations

from functools import partial

import torch
from measure import Bench, Call, Work
from paged_kernels.quantize_rows import quantize_rows

WIDTHS = (4096, 14336)
KINDS = {"int8": (torch.int8, -1), "fp8": (torch.float8_e4m3fn, -1)}
KINDS["fp8 groups of 128"] = (torch.float8_e4m3fn, 128)


def quantize(bench: Bench, kind: str, rows: int, width: int) -> Call:
    dtype, group_size = KINDS[kind]
    return partial(quantize_rows, bench.random(rows, width), dtype, group_size=group_size)


def run(bench: Bench) -> None:
    bench.warm_up(*(quantize(bench, kind, 1, width) for kind in KINDS for width in WIDTHS))
    for kind in KINDS:
        for width in WIDTHS:
            for rows in bench.sizes(1, 64, 256, 8192):
                work = Work(bytes=rows * width * (torch.bfloat16.itemsize + 1))
                make = partial(quantize, bench, kind, rows, width)
                bench.time(f"quantize_rows, {kind}", f"{rows}x{width}", work, make)

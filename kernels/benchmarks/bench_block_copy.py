"""Benchmark of block copies in all Llama-3-8B layers: on the device, to the host and back."""

from __future__ import annotations

from functools import partial

import torch
from attention import BLOCK_SIZE, LLAMA_8B
from measure import Bench, Call, Work
from paged_kernels.block_copy import copy_blocks
from torch import Tensor

LAYERS = 32
_SHAPE = 2, LLAMA_8B.keys, BLOCK_SIZE, LLAMA_8B.dim
_BLOCK_BYTES = 2 * LLAMA_8B.keys * BLOCK_SIZE * LLAMA_8B.dim * torch.bfloat16.itemsize


def on_device(bench: Bench, pairs: int) -> Tensor:
    return bench.random(_layers(bench), pairs, *_SHAPE)


def on_host(bench: Bench, pairs: int) -> Tensor:
    pinned = bench.device.type == "cuda"
    return torch.zeros(_layers(bench), pairs, *_SHAPE, dtype=torch.bfloat16, pin_memory=pinned)


def copy(bench: Bench, source: Tensor, target: Tensor) -> Call:
    """Return a call that copies scattered blocks to scattered blocks."""
    source_ids, target_ids = (
        torch.randperm(source.shape[1], dtype=torch.int32, device=bench.device) for _ in range(2)
    )
    return partial(copy_blocks, source, target, source_ids, target_ids)


def within(bench: Bench, pairs: int) -> Call:
    return copy(bench, on_device(bench, pairs), on_device(bench, pairs))


def out(bench: Bench, pairs: int) -> Call:
    return copy(bench, on_device(bench, pairs), on_host(bench, pairs))


def back(bench: Bench, pairs: int) -> Call:
    return copy(bench, on_host(bench, pairs), on_device(bench, pairs))


def time_host_copies(bench: Bench, pairs: int) -> None:
    """Compare with one contiguous copy of the same size; launch overhead is negligible here."""
    size = _layers(bench) * pairs * _BLOCK_BYTES
    device, host = on_device(bench, pairs), on_host(bench, pairs)
    for name, make, ends in (
        ("copy_blocks to host", out, (host, device)),
        ("copy_blocks from host", back, (device, host)),
    ):
        call = partial(ends[0].copy_, ends[1], non_blocking=True)
        limit = "pinned copy", bench.clock.microseconds([call], captured=False)
        build = partial(make, bench, pairs)
        bench.time(name, f"{pairs} blocks", Work(bytes=size), build, ceiling=limit, captured=False)


def run(bench: Bench) -> None:
    bench.warm_up(*(make(bench, 1) for make in (within, out, back)))
    for pairs in bench.sizes(1, 16, 256):
        work = Work(bytes=2 * _layers(bench) * pairs * _BLOCK_BYTES)
        bench.time("copy_blocks", f"{pairs} blocks", work, partial(within, bench, pairs))
    time_host_copies(bench, *bench.sizes(64)[:1])


def _layers(bench: Bench) -> int:
    return 1 if bench.quick else LAYERS

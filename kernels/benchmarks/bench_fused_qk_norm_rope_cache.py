"""Benchmark of rotating queries and keys and writing the cache, with Llama-3-8B's heads."""

from __future__ import annotations

from functools import partial

import torch
from attention import BLOCK_SIZE, DTYPE, LLAMA_8B
from measure import Bench, Call, Work
from paged_kernels.fused_qk_norm_rope_cache import fused_qk_norm_rope_cache

QUANTIZED = torch.float8_e4m3fn


def write(bench: Bench, tokens: int, cache_dtype: torch.dtype) -> Call:
    """Return a call that writes tokens to slots scattered over a cache with spare room."""
    heads, device = LLAMA_8B, bench.device
    num_blocks = 2 * -(-tokens // BLOCK_SIZE)
    cache = bench.random(num_blocks, 2, heads.keys, BLOCK_SIZE, heads.dim).to(cache_dtype)
    scale = None if cache_dtype == DTYPE else torch.ones(heads.keys, device=device)
    return partial(
        fused_qk_norm_rope_cache,
        bench.random(tokens, (heads.queries + 2 * heads.keys) * heads.dim),
        torch.arange(tokens, dtype=torch.int32, device=device),
        torch.randn(tokens, heads.dim, device=device).clamp(-1, 1),
        cache,
        torch.randperm(num_blocks * BLOCK_SIZE, device=device)[:tokens],
        num_heads=heads.queries,
        k_scale=scale,
        v_scale=scale,
    )


def moved(tokens: int, cache_dtype: torch.dtype) -> Work:
    """Return the bytes of queries, keys and values, each read and written, and of the angles."""
    queries = 2 * LLAMA_8B.queries * DTYPE.itemsize
    cached = 2 * LLAMA_8B.keys * (DTYPE.itemsize + cache_dtype.itemsize)
    angles = torch.float32.itemsize
    numbers = torch.int32.itemsize + torch.int64.itemsize  # position, slot
    return Work(bytes=tokens * ((queries + cached + angles) * LLAMA_8B.dim + numbers))


def run(bench: Bench) -> None:
    bench.warm_up(*(write(bench, 1, dtype) for dtype in (DTYPE, QUANTIZED)))
    for dtype in (DTYPE, QUANTIZED):
        for tokens in bench.sizes(1, 64, 256, 8192):
            make = partial(write, bench, tokens, dtype)
            bench.time(
                "fused_qk_norm_rope_cache",
                f"{tokens} tokens",
                moved(tokens, dtype),
                make,
                dtype=dtype,
            )

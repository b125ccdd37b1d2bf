"""Cases of the catalog for layers that keep a state for each sequence.

Model names stand for their shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paged_kernels._cases import ARCHS, BF16, FP16, FP32, NAMES, PROMPT, Case, empty, ints
from paged_kernels.causal_conv import causal_conv
from paged_kernels.gated_delta import gated_delta
from paged_kernels.linear_attention import linear_attention
from paged_kernels.mamba1_scan import mamba1_scan
from paged_kernels.rg_lru import rg_lru
from paged_kernels.selective_scan import selective_scan

_SLOTS = 256


def _num_seqs(num_tokens: int) -> int:
    """Return the sequences of a batch: up to 256 tokens are decodes, more are prompts."""
    return num_tokens if num_tokens <= _SLOTS else 1 + num_tokens // PROMPT


def _step(num_tokens: int) -> dict[str, Any]:
    num_seqs = _num_seqs(num_tokens)
    return {"slots": ints(num_seqs, 2), "query_start_loc": ints(num_seqs + 1)}


def _long_step(num_tokens: int) -> dict[str, Any]:
    """Return the arguments of a step that may have chunks."""
    num_seqs = _num_seqs(num_tokens)
    num_decodes = num_seqs if num_seqs == num_tokens else 0
    return {**_step(num_tokens), "seq_lens": ints(num_seqs), "num_decodes": num_decodes}


def _parts(num_tokens: int, dtype: torch.dtype, *shapes: tuple[int, int]) -> list[Tensor]:
    """Return heads of several layers that were computed as one, [num_tokens, heads, dim] each."""
    sizes = [heads * dim for heads, dim in shapes]
    parts = empty(num_tokens, sum(sizes), dtype=dtype).split(sizes, dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _conv(name: str, channels: int, width: int, *, silu: bool, dtype: torch.dtype = BF16) -> Case:
    def call(num_tokens: int) -> Tensor:
        x, weight = empty(num_tokens, channels, dtype=dtype), empty(channels, width, dtype=dtype)
        pool = empty(_SLOTS, channels, width - 1, dtype=dtype)
        return causal_conv(x, weight, None, pool, silu=silu, **_step(num_tokens))

    return Case("causal convolution", f"{name} {NAMES[dtype]}", call)


def _delta(
    name: str, key_heads: int, heads: int, dim: int, dtype: torch.dtype = BF16, *,
    of_channels: bool = False, archs: tuple[int, ...] = ARCHS,
) -> Case:  # fmt: skip
    def call(num_tokens: int) -> Tensor:
        q, k, v = _parts(num_tokens, dtype, (key_heads, dim), (key_heads, dim), (heads, dim))
        decays = (num_tokens, heads, dim) if of_channels else (num_tokens, heads)
        return gated_delta(
            q,
            k,
            v,
            empty(*decays, dtype=FP32),
            empty(num_tokens, heads, dtype=dtype),
            empty(_SLOTS, heads, dim, dim, dtype=FP32),
            **_long_step(num_tokens),
        )

    return Case("gated delta rule", f"{name} {NAMES[dtype]}", call, archs)


def _scan(
    name: str, heads: int, groups: int, head_dim: int, state_dim: int, dtype: torch.dtype = BF16
) -> Case:
    def call(num_tokens: int) -> Tensor:
        shapes = (heads, head_dim), (groups, state_dim), (groups, state_dim)
        x, b, c = _parts(num_tokens, dtype, *shapes)
        a, d, bias = (empty(heads, dtype=FP32) for _ in range(3))
        dt = empty(num_tokens, heads, dtype=dtype)
        pool = empty(_SLOTS, heads, head_dim, state_dim, dtype=FP32)
        return selective_scan(x, dt, a, b, c, d, bias, pool, **_long_step(num_tokens))

    return Case("selective scan", f"{name} {NAMES[dtype]}", call)


def _linear(name: str, heads: int, dim: int, dtype: torch.dtype = BF16) -> Case:
    def call(num_tokens: int) -> Tensor:
        pool = empty(_SLOTS, heads, dim, dim, dtype=FP32)
        q, k, v = _parts(num_tokens, dtype, *[(heads, dim)] * 3)
        return linear_attention(q, k, v, empty(heads, dtype=FP32), pool, **_long_step(num_tokens))

    return Case("linear attention", f"{name} {NAMES[dtype]}", call)


def _mamba1(name: str, inner: int, state_dim: int, dtype: torch.dtype = BF16) -> Case:
    def call(num_tokens: int) -> Tensor:
        x, dt = (empty(num_tokens, inner, dtype=dtype) for _ in range(2))
        b, c = (empty(num_tokens, state_dim, dtype=dtype) for _ in range(2))
        d, bias = (empty(inner, dtype=FP32) for _ in range(2))
        a, pool = (empty(*sizes, state_dim, dtype=FP32) for sizes in ((inner,), (_SLOTS, inner)))
        return mamba1_scan(x, dt, a, b, c, d, bias, pool, **_step(num_tokens))

    return Case("Mamba scan", f"{name} {NAMES[dtype]}", call)


def _gated_unit(name: str, width: int, dtype: torch.dtype = BF16) -> Case:
    def call(num_tokens: int) -> Tensor:
        x, gate, other = (empty(num_tokens, width, dtype=dtype) for _ in range(3))
        parameter, pool = empty(width, dtype=FP32), empty(_SLOTS, width, dtype=FP32)
        return rg_lru(x, gate, other, parameter, pool, **_step(num_tokens))

    return Case("RG-LRU", f"{name} {NAMES[dtype]}", call)


STATE_CASES = (
    _conv("Qwen3-Next", 8192, 4, silu=True),
    _conv("LFM2-1.2B", 2048, 3, silu=False),
    _conv("Qwen3-Next", 8192, 4, silu=True, dtype=FP32),
    _delta("Qwen3-Next", 16, 32, 128),
    # For the A100 the inverse in float16 spills 72 bytes a thread: it works, and is slower.
    _delta("Qwen3-Next", 16, 32, 128, FP16, archs=(90, 100)),
    _delta("Qwen3-Next", 16, 32, 128, FP32),
    _delta("Kimi-Linear", 32, 32, 128, of_channels=True),
    _scan("Nemotron-H-8B", 128, 8, 64, 128),
    _scan("Falcon-H1-1.5B", 48, 1, 64, 256),
    _scan("Nemotron-H-8B", 128, 8, 64, 128, FP32),
    _linear("MiniMax-Text-01", 64, 128),
    _mamba1("Jamba-Mini", 8192, 16),
    _gated_unit("RecurrentGemma-2B", 2560),
)
"""The cases."""

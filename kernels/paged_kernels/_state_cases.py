"""Cases of the catalog for layers that keep a state for each sequence.

Model names stand for their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paged_kernels.causal_conv import causal_conv
from paged_kernels.gated_delta import gated_delta
from paged_kernels.linear_attention import linear_attention
from paged_kernels.mamba1_scan import mamba1_scan
from paged_kernels.rg_lru import rg_lru
from paged_kernels.selective_scan import selective_scan

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_NAMES = {_BF16: "bf16", _FP16: "fp16", _FP32: "fp32"}
_ARCHS = (80, 90, 100)
_SLOTS = 256
_PROMPT = 512  # tokens per sequence, where there are more tokens


# The operation, its configuration, the call for a number of tokens, and the architectures.
_Case = tuple[str, str, Callable[[int], object], tuple[int, ...]]


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _num_seqs(num_tokens: int) -> int:
    """Return the sequences of a batch: up to 256 tokens are decodes, more are prompts."""
    return num_tokens if num_tokens <= _SLOTS else 1 + num_tokens // _PROMPT


def _step(num_tokens: int) -> dict[str, Any]:
    num_seqs = _num_seqs(num_tokens)
    return {"slots": _ints(num_seqs, 2), "query_start_loc": _ints(num_seqs + 1)}


def _long_step(num_tokens: int) -> dict[str, Any]:
    """Return the arguments of a step that may have chunks."""
    num_seqs = _num_seqs(num_tokens)
    num_decodes = num_seqs if num_seqs == num_tokens else 0
    return {**_step(num_tokens), "seq_lens": _ints(num_seqs), "num_decodes": num_decodes}


def _parts(num_tokens: int, dtype: torch.dtype, *shapes: tuple[int, int]) -> list[Tensor]:
    """Return heads of several layers that were computed as one, [num_tokens, heads, dim] each."""
    sizes = [heads * dim for heads, dim in shapes]
    parts = _empty(num_tokens, sum(sizes), dtype=dtype).split(sizes, dim=1)
    return [part.unflatten(1, shape) for part, shape in zip(parts, shapes, strict=True)]


def _conv(name: str, channels: int, width: int, *, silu: bool, dtype: torch.dtype = _BF16) -> _Case:
    def call(num_tokens: int) -> Tensor:
        x, weight = _empty(num_tokens, channels, dtype=dtype), _empty(channels, width, dtype=dtype)
        pool = _empty(_SLOTS, channels, width - 1, dtype=dtype)
        return causal_conv(x, weight, None, pool, silu=silu, **_step(num_tokens))

    return ("causal convolution", f"{name} {_NAMES[dtype]}", call, _ARCHS)


def _delta(
    name: str, key_heads: int, heads: int, dim: int, dtype: torch.dtype = _BF16, *,
    of_channels: bool = False, archs: tuple[int, ...] = _ARCHS,
) -> _Case:  # fmt: skip
    def call(num_tokens: int) -> Tensor:
        q, k, v = _parts(num_tokens, dtype, (key_heads, dim), (key_heads, dim), (heads, dim))
        decays = (num_tokens, heads, dim) if of_channels else (num_tokens, heads)
        return gated_delta(
            q,
            k,
            v,
            _empty(*decays, dtype=_FP32),
            _empty(num_tokens, heads, dtype=dtype),
            _empty(_SLOTS, heads, dim, dim, dtype=_FP32),
            **_long_step(num_tokens),
        )

    return ("gated delta rule", f"{name} {_NAMES[dtype]}", call, archs)


def _scan(
    name: str, heads: int, groups: int, head_dim: int, state_dim: int, dtype: torch.dtype = _BF16
) -> _Case:
    def call(num_tokens: int) -> Tensor:
        shapes = (heads, head_dim), (groups, state_dim), (groups, state_dim)
        x, b, c = _parts(num_tokens, dtype, *shapes)
        a, d, bias = (_empty(heads, dtype=_FP32) for _ in range(3))
        dt = _empty(num_tokens, heads, dtype=dtype)
        pool = _empty(_SLOTS, heads, head_dim, state_dim, dtype=_FP32)
        return selective_scan(x, dt, a, b, c, d, bias, pool, **_long_step(num_tokens))

    return ("selective scan", f"{name} {_NAMES[dtype]}", call, _ARCHS)


def _linear(name: str, heads: int, dim: int, dtype: torch.dtype = _BF16) -> _Case:
    def call(num_tokens: int) -> Tensor:
        pool = _empty(_SLOTS, heads, dim, dim, dtype=_FP32)
        q, k, v = _parts(num_tokens, dtype, *[(heads, dim)] * 3)
        return linear_attention(q, k, v, _empty(heads, dtype=_FP32), pool, **_long_step(num_tokens))

    return ("linear attention", f"{name} {_NAMES[dtype]}", call, _ARCHS)


def _mamba1(name: str, inner: int, state_dim: int, dtype: torch.dtype = _BF16) -> _Case:
    def call(num_tokens: int) -> Tensor:
        x, dt = (_empty(num_tokens, inner, dtype=dtype) for _ in range(2))
        b, c = (_empty(num_tokens, state_dim, dtype=dtype) for _ in range(2))
        d, bias = (_empty(inner, dtype=_FP32) for _ in range(2))
        a, pool = (_empty(*sizes, state_dim, dtype=_FP32) for sizes in ((inner,), (_SLOTS, inner)))
        return mamba1_scan(x, dt, a, b, c, d, bias, pool, **_step(num_tokens))

    return ("Mamba scan", f"{name} {_NAMES[dtype]}", call, _ARCHS)


def _gated_unit(name: str, width: int, dtype: torch.dtype = _BF16) -> _Case:
    def call(num_tokens: int) -> Tensor:
        x, gate, other = (_empty(num_tokens, width, dtype=dtype) for _ in range(3))
        parameter, pool = _empty(width, dtype=_FP32), _empty(_SLOTS, width, dtype=_FP32)
        return rg_lru(x, gate, other, parameter, pool, **_step(num_tokens))

    return ("RG-LRU", f"{name} {_NAMES[dtype]}", call, _ARCHS)


STATE_CASES = (
    _conv("Qwen3-Next", 8192, 4, silu=True),
    _conv("LFM2-1.2B", 2048, 3, silu=False),
    _conv("Qwen3-Next", 8192, 4, silu=True, dtype=_FP32),
    _delta("Qwen3-Next", 16, 32, 128),
    # For the A100 the inverse in float16 spills 72 bytes a thread: it works, and is slower.
    _delta("Qwen3-Next", 16, 32, 128, _FP16, archs=(90, 100)),
    _delta("Qwen3-Next", 16, 32, 128, _FP32),
    _delta("Kimi-Linear", 32, 32, 128, of_channels=True),
    _scan("Nemotron-H-8B", 128, 8, 64, 128),
    _scan("Falcon-H1-1.5B", 48, 1, 64, 256),
    _scan("Nemotron-H-8B", 128, 8, 64, 128, _FP32),
    _linear("MiniMax-Text-01", 64, 128),
    _mamba1("Jamba-Mini", 8192, 16),
    _gated_unit("RecurrentGemma-2B", 2560),
)
"""The cases, for `paged_kernels.catalogue.Case`."""

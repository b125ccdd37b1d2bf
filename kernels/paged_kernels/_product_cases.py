"""Cases of the catalog for products of weights, experts and adapters, and for what they read.

Model names stand for their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_kernels._cases import BF16, FP8, FP16, FP32, INT8, NAMES, Case, able, empty, ints
from paged_kernels.block_scaled_matmul import BLOCK_SIZE, block_scaled_matmul
from paged_kernels.choose_experts import choose_experts
from paged_kernels.dense_matmul import MAX_ROWS, dense_matmul, dense_matmul_silu_and_mul
from paged_kernels.experts import experts
from paged_kernels.int4 import PER_WORD
from paged_kernels.low_rank import expand, shrink
from paged_kernels.packed_words import num_words
from paged_kernels.quantize_rows import quantize_rows
from paged_kernels.scaled_matmul import scaled_matmul
from paged_kernels.w4a16_matmul import w4a16_matmul
from paged_kernels.w8a16_matmul import w8a16_matmul

_QKV, _GATE_UP, _DOWN = (6144, 4096), (28672, 4096), (4096, 14336)  # weights of Llama-3-8B


@dataclass(frozen=True, slots=True)
class _Experts:
    name: str
    num_experts: int
    top_k: int
    hidden: int
    intermediate: int


_MIXTRAL = _Experts("Mixtral-8x7B", 8, 2, 4096, 14336)
_QWEN3_30B = _Experts("Qwen3-30B-A3B", 128, 8, 2048, 768)
_GPT_OSS_20B = _Experts("gpt-oss-20b", 32, 4, 2880, 2880)
_NEMOTRON_NANO = _Experts("Nemotron-3-Nano", 128, 6, 2688, 1856)
_DEEPSEEK_EXPERTS = _Experts("DeepSeek-V3", 256, 8, 7168, 2048)


def _quantize(width: int, dtype: torch.dtype, group_size: int = -1) -> Case:
    def call(num_tokens: int) -> tuple[Tensor, Tensor]:
        return quantize_rows(empty(num_tokens, width, dtype=BF16), dtype, group_size=group_size)

    note = NAMES[dtype] if group_size == -1 else f"{NAMES[dtype]} groups of {group_size}"
    return Case("quantize rows", f"{width} {note}", call, able(dtype))


def _dense_matmul(
    weights: tuple[int, int], dtype: torch.dtype = BF16, *, gated: bool = False
) -> Case:
    features, width = weights
    product = dense_matmul_silu_and_mul if gated else dense_matmul

    def call(num_tokens: int) -> Tensor:
        rows = min(num_tokens, MAX_ROWS)
        x, w = (empty(count, width, dtype=dtype) for count in (rows, features))
        return product(x, w)

    note = f"{features}x{width} {NAMES[dtype]}{' gated' if gated else ''}"
    return Case("dense matmul", note, call)


def _scaled_matmul(weights: tuple[int, int], dtype: torch.dtype) -> Case:
    features, width = weights

    def call(num_tokens: int) -> Tensor:
        x, w = (empty(count, width, dtype=dtype) for count in (num_tokens, features))
        x_scales, w_scales = (empty(count, dtype=FP32) for count in (num_tokens, features))
        return scaled_matmul(x, x_scales, w, w_scales, out_dtype=BF16)

    configuration = f"{features}x{width} {NAMES[dtype]}"
    return Case("scaled matmul", configuration, call, able(dtype))


def _block_scaled_matmul(weights: tuple[int, int]) -> Case:
    features, width = weights

    def call(num_tokens: int) -> Tensor:
        x, w = (empty(count, width, dtype=FP8) for count in (num_tokens, features))
        blocks = width // BLOCK_SIZE
        x_scales = empty(num_tokens, blocks, dtype=FP32)
        w_scales = empty(features // BLOCK_SIZE, blocks, dtype=FP32)
        return block_scaled_matmul(x, x_scales, w, w_scales, out_dtype=BF16)

    return Case("block-scaled matmul", f"{features}x{width} fp8", call, able(FP8))


def _w4a16_matmul(
    weights: tuple[int, int],
    group_size: int,
    dtype: torch.dtype = BF16,
    *,
    zero_points: bool = False,
) -> Case:
    features, width = weights
    groups = 1 if group_size == -1 else width // group_size

    def call(num_tokens: int) -> Tensor:
        return w4a16_matmul(
            empty(num_tokens, width, dtype=dtype),
            ints(features, num_words(width, 4)),
            empty(features, groups, dtype=dtype),
            group_size=group_size,
            zero_points=ints(features, -(-groups // PER_WORD)) if zero_points else None,
        )

    grouped = "one group" if group_size == -1 else f"groups of {group_size}"
    note = f"{grouped} zero points" if zero_points else grouped
    return Case("w4a16 matmul", f"{features}x{width} {NAMES[dtype]} {note}", call)


def _w8a16_matmul(
    weights: tuple[int, int], group_size: int, *, float8: bool = False, zero_points: bool = False
) -> Case:
    features, width = weights
    groups = 1 if group_size == -1 else width // group_size

    def call(num_tokens: int) -> Tensor:
        return w8a16_matmul(
            empty(num_tokens, width, dtype=BF16),
            ints(features, num_words(width, 8)),
            empty(features, groups, dtype=FP32 if float8 else BF16),
            group_size=group_size,
            float8=float8,
            zero_points=ints(features, -(-groups // 4)) if zero_points else None,
        )

    grouped = "one group" if group_size == -1 else f"groups of {group_size}"
    note = f"{grouped} zero points" if zero_points else grouped
    return Case("w8a16 matmul", f"{features}x{width} {'fp8' if float8 else 'int8'} {note}", call)


def _experts(
    model: _Experts,
    dtype: torch.dtype = BF16,
    note: str = "",
    *,
    gated: bool = True,
    bias: bool = False,
    has_slots: bool = True,
    **options: Any,
) -> Case:
    count, hidden, inner = model.num_experts, model.hidden, model.intermediate
    features = 2 * inner if gated else inner

    def call(num_tokens: int) -> Tensor:
        biases: dict[str, Any] = {}
        if bias:
            biases["gate_up_bias"] = empty(count, features, dtype=dtype)
            biases["down_bias"] = empty(count, hidden, dtype=dtype)
        return experts(
            empty(num_tokens, hidden, dtype=dtype),
            empty(count, features, hidden, dtype=dtype),
            empty(count, hidden, inner, dtype=dtype),
            ints(num_tokens, model.top_k),
            empty(num_tokens, model.top_k, dtype=FP32),
            gated=gated,
            slots=empty(num_tokens, dtype=torch.int64) if has_slots else None,
            **biases,
            **options,
        )

    described = f"{model.name} {NAMES[dtype]} {note}".rstrip()
    return Case("experts", described, call)


def _choose_experts(model: _Experts, dtype: torch.dtype = BF16, **options: Any) -> Case:
    def call(num_tokens: int) -> tuple[Tensor, Tensor]:
        logits = empty(num_tokens, model.num_experts, dtype=dtype)
        return choose_experts(logits, model.top_k, **options)

    return Case("choice of experts", f"{model.name} {NAMES[dtype]}", call)


def _low_rank(
    label: str, width: int, sizes: tuple[int, ...], max_rank: int, dtype: torch.dtype = BF16
) -> Case:
    num_slots, parts, features = 8, len(sizes), sum(sizes)

    def call(num_tokens: int) -> None:
        ranks, slots = ints(num_slots, parts), ints(8192)
        x, out = (empty(num_tokens, size, dtype=dtype) for size in (width, features))
        a = empty(num_slots, parts, max_rank, width, dtype=dtype)
        b = empty(num_slots, features, max_rank, dtype=dtype)
        expand(out, shrink(x, a, ranks, slots), b, ranks, slots, sizes)

    return Case("low rank", f"{label} rank {max_rank} {NAMES[dtype]}", call)


PRODUCT_CASES = (
    _quantize(4096, INT8),
    _quantize(14336, INT8),
    _quantize(4096, FP8),
    _quantize(14336, FP8, 128),
    _dense_matmul(_QKV),
    _dense_matmul(_DOWN),
    _dense_matmul(_DOWN, FP16),
    _dense_matmul(_GATE_UP, gated=True),
    _dense_matmul(_GATE_UP, FP16, gated=True),
    _scaled_matmul(_QKV, INT8),
    _scaled_matmul(_GATE_UP, INT8),
    _scaled_matmul(_DOWN, INT8),
    _scaled_matmul(_QKV, FP8),
    _scaled_matmul(_DOWN, FP8),
    _block_scaled_matmul(_QKV),
    _block_scaled_matmul(_DOWN),
    _w4a16_matmul(_QKV, 128),
    _w4a16_matmul(_DOWN, 128),
    _w4a16_matmul(_QKV, 128, zero_points=True),
    _w4a16_matmul(_GATE_UP, 64),
    _w4a16_matmul(_GATE_UP, 32),
    _w4a16_matmul(_QKV, 32, zero_points=True),
    _experts(_MIXTRAL),
    _experts(_MIXTRAL, FP32),
    _experts(_MIXTRAL, note="last layer", has_slots=False),
    _experts(_QWEN3_30B),
    _experts(_QWEN3_30B, FP16),
    _experts(_GPT_OSS_20B, bias=True, alpha=1.702, limit=7.0, up_offset=1.0),
    _experts(_QWEN3_30B, note="GELU", alpha=1.5957691, cubic=0.0713548),
    _experts(_NEMOTRON_NANO, gated=False),
    _choose_experts(_MIXTRAL, normalize=True),
    _choose_experts(_QWEN3_30B, normalize=True),
    _choose_experts(_QWEN3_30B, FP32),
    _choose_experts(_GPT_OSS_20B, scoring="softmax_of_top"),
    _choose_experts(
        _DEEPSEEK_EXPERTS,
        scoring="sigmoid",
        normalize=True,
        scale=2.5,
        bias=empty(256, dtype=FP32),
        groups=(8, 4, 2),
    ),
    _low_rank("qkv", 4096, (4096, 1024, 1024), 16),
    _low_rank("qkv", 4096, (4096, 1024, 1024), 64),
    _low_rank("gate_up", 4096, (14336, 14336), 32),
    _low_rank("down", 14336, (4096,), 16, FP16),
    _low_rank("down", 14336, (4096,), 64, FP32),
    _w4a16_matmul(_DOWN, -1),
    _w4a16_matmul(_DOWN, 128, FP16),
    _w8a16_matmul(_QKV, 128, zero_points=True),
    _w8a16_matmul(_DOWN, -1),
    _w8a16_matmul(_QKV, 128, float8=True),
    _w8a16_matmul(_DOWN, -1, float8=True),
)
"""The cases."""

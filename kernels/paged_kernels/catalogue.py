"""Catalog of public wrapper calls, as serving makes them, on tensors without memory.

Model names stand for their shapes. The catalog serves only :mod:`paged_kernels.aot`, which compiles
the cases listed here ahead of time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_kernels._state_cases import STATE_CASES
from paged_kernels.attention_params import AttentionParams
from paged_kernels.block_copy import copy_blocks
from paged_kernels.block_scaled_matmul import BLOCK_SIZE, block_scaled_matmul
from paged_kernels.choose_experts import choose_experts
from paged_kernels.dense_matmul import MAX_ROWS, dense_matmul, dense_matmul_silu_and_mul
from paged_kernels.dtypes import QUANTIZED_DTYPES
from paged_kernels.experts import experts
from paged_kernels.fused_qk_norm_rope_cache import fused_qk_norm_rope_cache
from paged_kernels.int4 import PER_WORD
from paged_kernels.latent_attention import latent_attention
from paged_kernels.latent_rope_cache import latent_rope_cache
from paged_kernels.logprobs import LogProbs, logprobs
from paged_kernels.low_rank import expand, shrink
from paged_kernels.merge_attention import merge_attention
from paged_kernels.paged_attention import cascade_decode, paged_attention, plan_cascade
from paged_kernels.penalties import Penalties, apply_penalties, count_tokens
from paged_kernels.quantize_rows import quantize_rows
from paged_kernels.rms_norm import add_rms_norm, rms_norm
from paged_kernels.sampling import SamplingState, sample
from paged_kernels.scaled_matmul import scaled_matmul
from paged_kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from paged_kernels.token_masks import apply_token_masks
from paged_kernels.w4a16_matmul import w4a16_matmul
from paged_kernels.w8a16_matmul import w8a16_matmul
from paged_kernels.windows import Chunks

_ARCHS = (80, 90, 100)
_BLOCK_SIZE = 16
_BLOCKS_PER_SEQ = 512
_PROMPT = 512  # tokens per sequence in a prefill
_QKV, _GATE_UP, _DOWN = (6144, 4096), (28672, 4096), (4096, 14336)  # weights of Llama-3-8B

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_FP8, _INT8 = torch.float8_e4m3fn, torch.int8
_TOKEN_SCALES = "scales per token"
_NAMES = {_BF16: "bf16", _FP16: "fp16", _FP32: "fp32", _FP8: "fp8", _INT8: "int8"}


@dataclass(frozen=True, slots=True)
class Case:
    """An operation in one configuration."""

    operation: str
    configuration: str
    call: Callable[[int], object]  # wrapper call for n tokens (or sequences, or blocks)
    archs: tuple[int, ...] = _ARCHS

    @property
    def name(self) -> str:
        return f"{self.operation}, {self.configuration}"


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    heads: int
    kv_heads: int
    dim: int

    def qkv(self, tokens: int, dtype: torch.dtype) -> Tensor:
        return _empty(tokens, (self.heads + 2 * self.kv_heads) * self.dim, dtype=dtype)

    def queries(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """Return queries cut out of the QKV projection's output, so with strided rows.

        The view into heads precedes the slice: in the other order torch would report a single row
        as dense, and that case alone would need another binary.
        """
        return self.qkv(tokens, dtype).view(tokens, -1, self.dim)[:, : self.heads]

    def cache(self, dtype: torch.dtype) -> Tensor:
        """Return the KV cache of one layer."""
        return _empty(4096, 2, self.kv_heads, _BLOCK_SIZE, self.dim, dtype=dtype)

    def scales(self, cached: torch.dtype, per_token: bool = False) -> dict[str, Any]:
        """Return the scales of keys and values if the cache is quantized, else nothing."""
        if cached not in QUANTIZED_DTYPES:
            return {}
        if per_token:
            return {"kv_scales": _empty(4096, 2, self.kv_heads, _BLOCK_SIZE, dtype=_FP32)}
        return {name: _empty(self.kv_heads, dtype=_FP32) for name in ("k_scale", "v_scale")}


_LLAMA_8B = _Model("Llama-3-8B", 32, 8, 128)
_LLAMA_70B = _Model("Llama-3-70B", 64, 8, 128)
_QWEN_05B = _Model("Qwen2-0.5B", 14, 2, 64)
_PHI_2 = _Model("Phi-2", 32, 32, 80)
_PHI_3 = _Model("Phi-3-mini", 32, 32, 96)
_GEMMA_2B = _Model("Gemma-2B", 8, 1, 256)
_WIDE = _Model("heads of 512", 16, 2, 512)  # as in layers of Gemma 4 with full attention


@dataclass(frozen=True, slots=True)
class _Latent:
    name: str
    heads: int
    rank: int
    rotary: int

    def queries(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """Return queries with a row's size for each head."""
        return _empty(tokens, self.heads, self.rank + self.rotary, dtype=dtype)

    def cache(self, dtype: torch.dtype) -> Tensor:
        """Return the rows of one layer."""
        return _empty(4096, _BLOCK_SIZE, self.rank + self.rotary, dtype=dtype)


_DEEPSEEK_V3 = _Latent("DeepSeek-V3", 128, 512, 64)
_DEEPSEEK_V2_LITE = _Latent("DeepSeek-V2-Lite", 16, 512, 64)
_MINICPM3 = _Latent("MiniCPM3-4B", 40, 256, 32)


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


def _empty(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return _empty(*shape, dtype=torch.int32)


def _described(model: _Model, dtype: torch.dtype, cached: torch.dtype, note: str) -> str:
    cache = "" if cached == dtype else f"{_NAMES[cached]} cache"
    return " ".join(filter(None, (model.name, _NAMES[dtype], cache, note)))


def _able(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the architectures that have a dtype: the A100's tensor cores have no float8."""
    return tuple(arch for arch in _ARCHS if dtype != _FP8 or arch >= 89)


def _decode(
    model: _Model,
    dtype: torch.dtype = _BF16,
    cached: torch.dtype | None = None,
    note: str = "",
    *,
    per_token: bool = False,
    **options: Any,
) -> Case:
    stored = cached or dtype

    def call(num_seqs: int) -> Tensor:
        return paged_attention(
            model.queries(num_seqs, dtype),
            model.cache(stored),
            _ints(num_seqs, _BLOCKS_PER_SEQ),
            _ints(num_seqs),
            _ints(num_seqs + 1),
            AttentionParams(model.dim**-0.5, **model.scales(stored, per_token), **options),
            num_decodes=num_seqs,
        )

    described = _described(model, dtype, stored, _TOKEN_SCALES if per_token else note)
    return Case("decode", described, call, _able(stored))


def _prefill(
    model: _Model,
    dtype: torch.dtype = _BF16,
    cached: torch.dtype | None = None,
    note: str = "",
    *,
    per_token: bool = False,
    **options: Any,
) -> Case:
    stored = cached or dtype

    def call(num_tokens: int) -> Tensor:
        num_seqs = 1 + num_tokens // _PROMPT
        return paged_attention(
            model.queries(num_tokens, dtype),
            model.cache(stored),
            _ints(num_seqs, _BLOCKS_PER_SEQ),
            _ints(num_seqs),
            _ints(num_seqs + 1),
            AttentionParams(model.dim**-0.5, **model.scales(stored, per_token), **options),
        )

    described = _described(model, dtype, stored, _TOKEN_SCALES if per_token else note)
    return Case("prefill", described, call, _able(stored))


def _latent(model: _Latent, dtype: torch.dtype = _BF16, *, prompts: bool = False) -> Case:
    def call(num_tokens: int) -> Tensor:
        num_seqs = 1 + num_tokens // _PROMPT if prompts else num_tokens
        return latent_attention(
            model.queries(num_tokens, dtype),
            model.cache(dtype),
            _ints(num_seqs, _BLOCKS_PER_SEQ),
            _ints(num_seqs),
            _ints(num_seqs + 1),
            rank=model.rank,
            scale=1.0,
            num_decodes=0 if prompts else num_seqs,
        )

    operation = "latent prefill" if prompts else "latent decode"
    return Case(operation, f"{model.name} {_NAMES[dtype]}", call)


def _latent_write(model: _Latent, dtype: torch.dtype = _BF16) -> Case:
    def call(num_tokens: int) -> None:
        latent_rope_cache(
            model.queries(num_tokens, dtype),
            _empty(num_tokens, model.rank + model.rotary, dtype=dtype),
            _ints(num_tokens),
            _empty(8192, model.rotary, dtype=_FP32),
            model.cache(dtype),
            _empty(num_tokens, dtype=torch.int64),
        )

    return Case("latent write", f"{model.name} {_NAMES[dtype]}", call)


def _latents() -> tuple[Case, ...]:
    cases = []
    for prompts in (False, True):
        models = _DEEPSEEK_V3, _DEEPSEEK_V2_LITE, _MINICPM3
        cases += [_latent(model, prompts=prompts) for model in models]
        cases += [_latent(_MINICPM3, dtype, prompts=prompts) for dtype in (_FP16, _FP32)]
    return (*cases, _latent_write(_DEEPSEEK_V3), _latent_write(_MINICPM3, _FP32))


def _cascade(model: _Model) -> Case:
    def call(num_seqs: int) -> Tensor:
        q, cache = model.queries(num_seqs, _BF16), model.cache(_BF16)
        table, lengths = _ints(num_seqs, _BLOCKS_PER_SEQ), _ints(num_seqs)
        plan = plan_cascade(q, cache, table, lengths, num_shared_blocks=64)
        return cascade_decode(q, cache, AttentionParams(model.dim**-0.5), plan)

    return Case("shared prefix", _described(model, _BF16, _BF16, ""), call)


def _merge(model: _Model, dtype: torch.dtype = _BF16) -> Case:
    def call(num_tokens: int) -> Tensor:
        first, second = (_empty(num_tokens, model.heads, model.dim, dtype=dtype) for _ in range(2))
        lse, other = (_empty(num_tokens, model.heads, dtype=_FP32) for _ in range(2))
        return merge_attention(first, lse, second, other)

    return Case("merge", _described(model, dtype, dtype, ""), call)


def _write(
    model: _Model,
    dtype: torch.dtype = _BF16,
    cached: torch.dtype | None = None,
    *,
    norms: bool = False,
    per_token: bool = False,
) -> Case:
    stored = cached or dtype

    def call(num_tokens: int) -> None:
        norm = _empty(model.dim, dtype=dtype) if norms else None
        fused_qk_norm_rope_cache(
            model.qkv(num_tokens, dtype),
            _ints(num_tokens),
            _empty(8192, model.dim, dtype=_FP32),
            model.cache(stored),
            _empty(num_tokens, dtype=torch.int64),
            num_heads=model.heads,
            q_norm=norm,
            k_norm=norm,
            **model.scales(stored, per_token),
        )

    note = "norms" if norms else _TOKEN_SCALES if per_token else ""
    return Case("KV write", _described(model, dtype, stored, note), call, _able(stored))


def _copy(model: _Model, layers: int, cached: torch.dtype = _BF16) -> Case:
    def call(num_pairs: int) -> None:
        source, target = (torch.stack([model.cache(cached)] * layers) for _ in range(2))
        copy_blocks(source, target, _ints(num_pairs), _ints(num_pairs))

    return Case("block copy", f"{model.name} {_NAMES[cached]} cache", call)


def _norm(width: int, dtype: torch.dtype = _BF16, *, add: bool = True) -> Case:
    def call(num_tokens: int) -> Tensor:
        x, residual = (_empty(num_tokens, width, dtype=dtype) for _ in range(2))
        weight = _empty(width, dtype=dtype)
        if add:
            return add_rms_norm(x, residual, weight, 1e-5)
        return rms_norm(x, weight, 1e-5)

    return Case("add and norm" if add else "norm", f"{width} {_NAMES[dtype]}", call)


def _activation(width: int, dtype: torch.dtype = _BF16, *, gelu: bool = False) -> Case:
    def call(num_tokens: int) -> Tensor:
        gate_up = _empty(num_tokens, 2 * width, dtype=dtype)
        return gelu_tanh_and_mul(gate_up) if gelu else silu_and_mul(gate_up)

    note = f"{width} {_NAMES[dtype]}{' gelu' if gelu else ''}"
    return Case("activation", note, call)


def _quantize(width: int, dtype: torch.dtype, group_size: int = -1) -> Case:
    def call(num_tokens: int) -> tuple[Tensor, Tensor]:
        return quantize_rows(_empty(num_tokens, width, dtype=_BF16), dtype, group_size=group_size)

    note = _NAMES[dtype] if group_size == -1 else f"{_NAMES[dtype]} groups of {group_size}"
    return Case("quantize rows", f"{width} {note}", call, _able(dtype))


def _dense_matmul(
    weights: tuple[int, int], dtype: torch.dtype = _BF16, *, gated: bool = False
) -> Case:
    features, width = weights
    product = dense_matmul_silu_and_mul if gated else dense_matmul

    def call(num_tokens: int) -> Tensor:
        rows = min(num_tokens, MAX_ROWS)
        x, w = (_empty(count, width, dtype=dtype) for count in (rows, features))
        return product(x, w)

    note = f"{features}x{width} {_NAMES[dtype]}{' gated' if gated else ''}"
    return Case("dense matmul", note, call)


def _scaled_matmul(weights: tuple[int, int], dtype: torch.dtype) -> Case:
    features, width = weights

    def call(num_tokens: int) -> Tensor:
        x, w = (_empty(count, width, dtype=dtype) for count in (num_tokens, features))
        x_scales, w_scales = (_empty(count, dtype=_FP32) for count in (num_tokens, features))
        return scaled_matmul(x, x_scales, w, w_scales, out_dtype=_BF16)

    configuration = f"{features}x{width} {_NAMES[dtype]}"
    return Case("scaled matmul", configuration, call, _able(dtype))


def _block_scaled_matmul(weights: tuple[int, int]) -> Case:
    features, width = weights

    def call(num_tokens: int) -> Tensor:
        x, w = (_empty(count, width, dtype=_FP8) for count in (num_tokens, features))
        blocks = width // BLOCK_SIZE
        x_scales = _empty(num_tokens, blocks, dtype=_FP32)
        w_scales = _empty(features // BLOCK_SIZE, blocks, dtype=_FP32)
        return block_scaled_matmul(x, x_scales, w, w_scales, out_dtype=_BF16)

    return Case("block-scaled matmul", f"{features}x{width} fp8", call, _able(_FP8))


def _w4a16_matmul(
    weights: tuple[int, int],
    group_size: int,
    dtype: torch.dtype = _BF16,
    *,
    zero_points: bool = False,
) -> Case:
    features, width = weights
    groups = 1 if group_size == -1 else width // group_size

    def call(num_tokens: int) -> Tensor:
        return w4a16_matmul(
            _empty(num_tokens, width, dtype=dtype),
            _ints(features, width // PER_WORD),
            _empty(features, groups, dtype=dtype),
            group_size=group_size,
            zero_points=_ints(features, -(-groups // PER_WORD)) if zero_points else None,
        )

    grouped = "one group" if group_size == -1 else f"groups of {group_size}"
    note = f"{grouped} zero points" if zero_points else grouped
    return Case("w4a16 matmul", f"{features}x{width} {_NAMES[dtype]} {note}", call)


def _w8a16_matmul(
    weights: tuple[int, int], group_size: int, *, float8: bool = False, zero_points: bool = False
) -> Case:
    features, width = weights
    groups = 1 if group_size == -1 else width // group_size

    def call(num_tokens: int) -> Tensor:
        return w8a16_matmul(
            _empty(num_tokens, width, dtype=_BF16),
            _ints(features, width // 4),
            _empty(features, groups, dtype=_FP32 if float8 else _BF16),
            group_size=group_size,
            float8=float8,
            zero_points=_ints(features, -(-groups // 4)) if zero_points else None,
        )

    grouped = "one group" if group_size == -1 else f"groups of {group_size}"
    note = f"{grouped} zero points" if zero_points else grouped
    return Case("w8a16 matmul", f"{features}x{width} {'fp8' if float8 else 'int8'} {note}", call)


def _experts(
    model: _Experts,
    dtype: torch.dtype = _BF16,
    note: str = "",
    *,
    gated: bool = True,
    bias: bool = False,
    **options: Any,
) -> Case:
    count, hidden, inner = model.num_experts, model.hidden, model.intermediate
    features = 2 * inner if gated else inner

    def call(num_tokens: int) -> Tensor:
        biases: dict[str, Any] = {}
        if bias:
            biases["gate_up_bias"] = _empty(count, features, dtype=dtype)
            biases["down_bias"] = _empty(count, hidden, dtype=dtype)
        return experts(
            _empty(num_tokens, hidden, dtype=dtype),
            _empty(count, features, hidden, dtype=dtype),
            _empty(count, hidden, inner, dtype=dtype),
            _ints(num_tokens, model.top_k),
            _empty(num_tokens, model.top_k, dtype=_FP32),
            gated=gated,
            **biases,
            **options,
        )

    described = f"{model.name} {_NAMES[dtype]} {note}".rstrip()
    return Case("experts", described, call)


def _choose_experts(model: _Experts, dtype: torch.dtype = _BF16, **options: Any) -> Case:
    def call(num_tokens: int) -> tuple[Tensor, Tensor]:
        logits = _empty(num_tokens, model.num_experts, dtype=dtype)
        return choose_experts(logits, model.top_k, **options)

    return Case("choice of experts", f"{model.name} {_NAMES[dtype]}", call)


def _low_rank(
    label: str, width: int, sizes: tuple[int, ...], max_rank: int, dtype: torch.dtype = _BF16
) -> Case:
    num_slots, parts, features = 8, len(sizes), sum(sizes)

    def call(num_tokens: int) -> None:
        ranks, slots = _ints(num_slots, parts), _ints(8192)
        x, out = (_empty(num_tokens, size, dtype=dtype) for size in (width, features))
        a = _empty(num_slots, parts, max_rank, width, dtype=dtype)
        b = _empty(num_slots, features, max_rank, dtype=dtype)
        expand(out, shrink(x, a, ranks, slots), b, ranks, slots, sizes)

    return Case("low rank", f"{label} rank {max_rank} {_NAMES[dtype]}", call)


def _sample(vocab: int, dtype: torch.dtype = _BF16) -> Case:
    def call(num_seqs: int) -> Tensor:
        slots = {name: _empty(256, dtype=_FP32) for name in ("temperature", "top_p", "min_p")}
        state = SamplingState(**slots, top_k=_ints(256), seed=_empty(256, dtype=torch.int64))
        logits = _empty(num_seqs, vocab, dtype=dtype)
        return sample(logits, _ints(num_seqs), _ints(num_seqs), state, _ints(num_seqs))

    return Case("sampling", f"{vocab} tokens {_NAMES[dtype]}", call)


def _logprobs(vocab: int, width: int, dtype: torch.dtype = _BF16) -> Case:
    def call(num_seqs: int) -> LogProbs:
        logits = _empty(num_seqs, vocab, dtype=dtype)
        return logprobs(logits, _ints(num_seqs), _ints(num_seqs), _ints(256), width)

    return Case("log-probabilities", f"{width} of {vocab} tokens {_NAMES[dtype]}", call)


def _penalties(vocab: int) -> Case:
    def call(num_seqs: int) -> None:
        slots = {name: _empty(256, dtype=_FP32) for name in ("repetition", "presence", "frequency")}
        penalties = Penalties(**slots, min_position=_ints(256), stop_ids=_ints(256, 8))
        logits = _empty(num_seqs, vocab, dtype=_FP32)
        counts, rows = _ints(256, vocab), _ints(num_seqs)
        inputs = _empty(num_seqs, dtype=torch.int64)
        apply_penalties(logits, rows, _ints(num_seqs), inputs, counts, penalties)
        count_tokens(counts, rows, _ints(num_seqs), inputs)

    return Case("penalties", f"{vocab} tokens", call)


def _token_masks(vocab: int) -> Case:
    def call(num_seqs: int) -> None:
        logits = _empty(num_seqs, vocab, dtype=_FP32)
        apply_token_masks(logits, _ints(num_seqs), _ints(num_seqs, -(-vocab // 32)))

    return Case("token masks", f"{vocab} tokens", call)


def _attention() -> tuple[Case, ...]:
    cases = []
    for make in (_decode, _prefill):
        cases += [make(_LLAMA_8B, dtype) for dtype in (_BF16, _FP16, _FP32)]
        cases += [make(_LLAMA_8B, cached=cached) for cached in (_FP8, _INT8)]
        cases += [make(_LLAMA_8B, cached=cached, per_token=True) for cached in (_FP8, _INT8)]
        cases += [make(model) for model in (_LLAMA_70B, _QWEN_05B, _PHI_2, _PHI_3, _GEMMA_2B)]
        cases += [
            make(_GEMMA_2B, _FP32),
            make(_WIDE),
            make(_WIDE, _FP32),
            *(make(_WIDE, cached=cached) for cached in (_FP8, _INT8)),
            *(make(_WIDE, cached=cached, per_token=True) for cached in (_FP8, _INT8)),
            make(_LLAMA_8B, note="window", window=4096),
            make(_LLAMA_8B, note="chunks", window=Chunks(8192)),
            make(_LLAMA_8B, note="softcap", softcap=50.0),
            make(_LLAMA_8B, note="sinks", sinks=_empty(_LLAMA_8B.heads, dtype=_FP32)),
            make(_LLAMA_8B, note="ALiBi", alibi_slopes=_empty(_LLAMA_8B.heads, dtype=_FP32)),
        ]
    return tuple(cases)


CASES = {
    case.name: case
    for case in (
        *_attention(),
        *_latents(),
        _cascade(_LLAMA_8B),
        _cascade(_QWEN_05B),
        _cascade(_WIDE),
        _merge(_LLAMA_8B),
        _merge(_PHI_2),
        _write(_LLAMA_8B),
        _write(_LLAMA_8B, _FP16),
        _write(_LLAMA_8B, _FP32),
        _write(_LLAMA_8B, cached=_FP8),
        _write(_LLAMA_8B, cached=_INT8),
        _write(_LLAMA_8B, cached=_FP8, per_token=True),
        _write(_LLAMA_8B, cached=_INT8, per_token=True),
        _write(_LLAMA_8B, norms=True),
        _write(_LLAMA_70B),
        _write(_QWEN_05B),
        _write(_PHI_2),
        _write(_GEMMA_2B),
        _write(_WIDE, norms=True),
        _copy(_LLAMA_8B, 32),
        _copy(_QWEN_05B, 24, _INT8),
        _norm(4096),
        _norm(4096, add=False),
        _norm(4096, _FP32),
        _norm(896),
        _norm(8192),
        _norm(18432),  # wider than one program holds
        _activation(14336),
        _activation(14336, _FP32),
        _activation(4864),
        _activation(9216, gelu=True),  # Gemma 2 2B
        _quantize(4096, _INT8),
        _quantize(14336, _INT8),
        _quantize(4096, _FP8),
        _quantize(14336, _FP8, 128),
        _dense_matmul(_QKV),
        _dense_matmul(_DOWN),
        _dense_matmul(_DOWN, _FP16),
        _dense_matmul(_GATE_UP, gated=True),
        _dense_matmul(_GATE_UP, _FP16, gated=True),
        _scaled_matmul(_QKV, _INT8),
        _scaled_matmul(_GATE_UP, _INT8),
        _scaled_matmul(_DOWN, _INT8),
        _scaled_matmul(_QKV, _FP8),
        _scaled_matmul(_DOWN, _FP8),
        _block_scaled_matmul(_QKV),
        _block_scaled_matmul(_DOWN),
        _w4a16_matmul(_QKV, 128),
        _w4a16_matmul(_DOWN, 128),
        _w4a16_matmul(_QKV, 128, zero_points=True),
        _w4a16_matmul(_GATE_UP, 64),
        _w4a16_matmul(_QKV, 32, zero_points=True),
        _experts(_MIXTRAL),
        _experts(_MIXTRAL, _FP32),
        _experts(_QWEN3_30B),
        _experts(_QWEN3_30B, _FP16),
        _experts(_GPT_OSS_20B, bias=True, alpha=1.702, limit=7.0, up_offset=1.0),
        _experts(_QWEN3_30B, note="GELU", alpha=1.5957691, cubic=0.0713548),
        _experts(_NEMOTRON_NANO, gated=False),
        _choose_experts(_MIXTRAL, normalize=True),
        _choose_experts(_QWEN3_30B, normalize=True),
        _choose_experts(_QWEN3_30B, _FP32),
        _choose_experts(_GPT_OSS_20B, scoring="softmax_of_top"),
        _choose_experts(
            _DEEPSEEK_EXPERTS,
            scoring="sigmoid",
            normalize=True,
            scale=2.5,
            bias=_empty(256, dtype=_FP32),
            groups=(8, 4, 2),
        ),
        _low_rank("qkv", 4096, (4096, 1024, 1024), 16),
        _low_rank("qkv", 4096, (4096, 1024, 1024), 64),
        _low_rank("gate_up", 4096, (14336, 14336), 32),
        _low_rank("down", 14336, (4096,), 16, _FP16),
        _low_rank("down", 14336, (4096,), 64, _FP32),
        _w4a16_matmul(_DOWN, -1),
        _w4a16_matmul(_DOWN, 128, _FP16),
        _w8a16_matmul(_QKV, 128, zero_points=True),
        _w8a16_matmul(_DOWN, -1),
        _w8a16_matmul(_QKV, 128, float8=True),
        _w8a16_matmul(_DOWN, -1, float8=True),
        _sample(128256),
        _sample(128256, _FP16),
        _sample(128256, _FP32),
        _sample(151936),
        _logprobs(128256, 20),
        _logprobs(128256, 20, _FP32),
        _penalties(128256),
        _token_masks(128256),
        *(Case(*case) for case in STATE_CASES),
    )
}
"""Every case by its name."""

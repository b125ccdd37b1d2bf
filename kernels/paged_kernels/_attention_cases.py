"""Cases of the catalog for attention and the KV cache.

Model names stand for their shapes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paged_kernels._cases import BF16, FP8, FP16, FP32, INT8, NAMES, PROMPT, Case, able, empty, ints
from paged_kernels.attention_params import AttentionParams
from paged_kernels.block_copy import copy_blocks
from paged_kernels.dtypes import QUANTIZED_DTYPES
from paged_kernels.fused_qk_norm_rope_cache import fused_qk_norm_rope_cache
from paged_kernels.latent_attention import latent_attention
from paged_kernels.latent_rope_cache import latent_rope_cache
from paged_kernels.merge_attention import merge_attention
from paged_kernels.paged_attention import cascade_decode, paged_attention, plan_cascade
from paged_kernels.windows import Chunks

_BLOCK_SIZE = 16
_BLOCKS_PER_SEQ = 512
_TOKEN_SCALES = "scales per token"


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    heads: int
    kv_heads: int
    dim: int

    def qkv(self, tokens: int, dtype: torch.dtype) -> Tensor:
        return empty(tokens, (self.heads + 2 * self.kv_heads) * self.dim, dtype=dtype)

    def queries(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """Return queries cut out of the QKV projection's output, so with strided rows.

        The view into heads precedes the slice: in the other order torch would report a single row
        as dense, and that case alone would need another binary.
        """
        return self.qkv(tokens, dtype).view(tokens, -1, self.dim)[:, : self.heads]

    def cache(self, dtype: torch.dtype) -> Tensor:
        """Return the KV cache of one layer."""
        return empty(4096, 2, self.kv_heads, _BLOCK_SIZE, self.dim, dtype=dtype)

    def scales(self, cached: torch.dtype, per_token: bool = False) -> dict[str, Any]:
        """Return the scales of keys and values if the cache is quantized, else nothing."""
        if cached not in QUANTIZED_DTYPES:
            return {}
        if per_token:
            return {"kv_scales": empty(4096, 2, self.kv_heads, _BLOCK_SIZE, dtype=FP32)}
        return {name: empty(self.kv_heads, dtype=FP32) for name in ("k_scale", "v_scale")}


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
        return empty(tokens, self.heads, self.rank + self.rotary, dtype=dtype)

    def cache(self, dtype: torch.dtype) -> Tensor:
        """Return the rows of one layer."""
        return empty(4096, _BLOCK_SIZE, self.rank + self.rotary, dtype=dtype)


_DEEPSEEK_V3 = _Latent("DeepSeek-V3", 128, 512, 64)
_DEEPSEEK_V2_LITE = _Latent("DeepSeek-V2-Lite", 16, 512, 64)
_MINICPM3 = _Latent("MiniCPM3-4B", 40, 256, 32)


def _described(model: _Model, dtype: torch.dtype, cached: torch.dtype, note: str) -> str:
    cache = "" if cached == dtype else f"{NAMES[cached]} cache"
    return " ".join(filter(None, (model.name, NAMES[dtype], cache, note)))


def _decode(
    model: _Model,
    dtype: torch.dtype = BF16,
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
            ints(num_seqs, _BLOCKS_PER_SEQ),
            ints(num_seqs),
            ints(num_seqs + 1),
            AttentionParams(model.dim**-0.5, **model.scales(stored, per_token), **options),
            num_decodes=num_seqs,
        )

    described = _described(model, dtype, stored, _TOKEN_SCALES if per_token else note)
    return Case("decode", described, call, able(stored))


def _prefill(
    model: _Model,
    dtype: torch.dtype = BF16,
    cached: torch.dtype | None = None,
    note: str = "",
    *,
    per_token: bool = False,
    **options: Any,
) -> Case:
    stored = cached or dtype

    def call(num_tokens: int) -> Tensor:
        num_seqs = 1 + num_tokens // PROMPT
        return paged_attention(
            model.queries(num_tokens, dtype),
            model.cache(stored),
            ints(num_seqs, _BLOCKS_PER_SEQ),
            ints(num_seqs),
            ints(num_seqs + 1),
            AttentionParams(model.dim**-0.5, **model.scales(stored, per_token), **options),
        )

    described = _described(model, dtype, stored, _TOKEN_SCALES if per_token else note)
    return Case("prefill", described, call, able(stored))


def _latent(model: _Latent, dtype: torch.dtype = BF16, *, prompts: bool = False) -> Case:
    def call(num_tokens: int) -> Tensor:
        num_seqs = 1 + num_tokens // PROMPT if prompts else num_tokens
        return latent_attention(
            model.queries(num_tokens, dtype),
            model.cache(dtype),
            ints(num_seqs, _BLOCKS_PER_SEQ),
            ints(num_seqs),
            ints(num_seqs + 1),
            rank=model.rank,
            scale=1.0,
            num_decodes=0 if prompts else num_seqs,
        )

    operation = "latent prefill" if prompts else "latent decode"
    return Case(operation, f"{model.name} {NAMES[dtype]}", call)


def _latent_write(model: _Latent, dtype: torch.dtype = BF16) -> Case:
    def call(num_tokens: int) -> None:
        latent_rope_cache(
            model.queries(num_tokens, dtype),
            empty(num_tokens, model.rank + model.rotary, dtype=dtype),
            ints(num_tokens),
            empty(8192, model.rotary, dtype=FP32),
            model.cache(dtype),
            empty(num_tokens, dtype=torch.int64),
        )

    return Case("latent write", f"{model.name} {NAMES[dtype]}", call)


def _latents() -> tuple[Case, ...]:
    cases = []
    for prompts in (False, True):
        models = _DEEPSEEK_V3, _DEEPSEEK_V2_LITE, _MINICPM3
        cases += [_latent(model, prompts=prompts) for model in models]
        cases += [_latent(_MINICPM3, dtype, prompts=prompts) for dtype in (FP16, FP32)]
    return (*cases, _latent_write(_DEEPSEEK_V3), _latent_write(_MINICPM3, FP32))


def _cascade(model: _Model) -> Case:
    def call(num_seqs: int) -> Tensor:
        q, cache = model.queries(num_seqs, BF16), model.cache(BF16)
        table, lengths = ints(num_seqs, _BLOCKS_PER_SEQ), ints(num_seqs)
        plan = plan_cascade(q, cache, table, lengths, num_shared_blocks=64)
        return cascade_decode(q, cache, AttentionParams(model.dim**-0.5), plan)

    return Case("shared prefix", _described(model, BF16, BF16, ""), call)


def _merge(model: _Model, dtype: torch.dtype = BF16) -> Case:
    def call(num_tokens: int) -> Tensor:
        first, second = (empty(num_tokens, model.heads, model.dim, dtype=dtype) for _ in range(2))
        lse, other = (empty(num_tokens, model.heads, dtype=FP32) for _ in range(2))
        return merge_attention(first, lse, second, other)

    return Case("merge", _described(model, dtype, dtype, ""), call)


def _write(
    model: _Model,
    dtype: torch.dtype = BF16,
    cached: torch.dtype | None = None,
    *,
    norms: bool = False,
    per_token: bool = False,
) -> Case:
    stored = cached or dtype

    def call(num_tokens: int) -> None:
        norm = empty(model.dim, dtype=dtype) if norms else None
        fused_qk_norm_rope_cache(
            model.qkv(num_tokens, dtype),
            ints(num_tokens),
            empty(8192, model.dim, dtype=FP32),
            model.cache(stored),
            empty(num_tokens, dtype=torch.int64),
            num_heads=model.heads,
            q_norm=norm,
            k_norm=norm,
            **model.scales(stored, per_token),
        )

    note = "norms" if norms else _TOKEN_SCALES if per_token else ""
    return Case("KV write", _described(model, dtype, stored, note), call, able(stored))


def _copy(model: _Model, layers: int, cached: torch.dtype = BF16) -> Case:
    def call(num_pairs: int) -> None:
        source, target = (torch.stack([model.cache(cached)] * layers) for _ in range(2))
        copy_blocks(source, target, ints(num_pairs), ints(num_pairs))

    return Case("block copy", f"{model.name} {NAMES[cached]} cache", call)


def _attention() -> tuple[Case, ...]:
    cases = []
    for make in (_decode, _prefill):
        cases += [make(_LLAMA_8B, dtype) for dtype in (BF16, FP16, FP32)]
        cases += [make(_LLAMA_8B, cached=cached) for cached in (FP8, INT8)]
        cases += [make(_LLAMA_8B, cached=cached, per_token=True) for cached in (FP8, INT8)]
        cases += [make(model) for model in (_LLAMA_70B, _QWEN_05B, _PHI_2, _PHI_3, _GEMMA_2B)]
        cases += [
            make(_GEMMA_2B, FP32),
            make(_WIDE),
            make(_WIDE, FP32),
            *(make(_WIDE, cached=cached) for cached in (FP8, INT8)),
            *(make(_WIDE, cached=cached, per_token=True) for cached in (FP8, INT8)),
            make(_LLAMA_8B, note="window", window=4096),
            make(_LLAMA_8B, note="chunks", window=Chunks(8192)),
            make(_LLAMA_8B, note="softcap", softcap=50.0),
            make(_LLAMA_8B, note="sinks", sinks=empty(_LLAMA_8B.heads, dtype=FP32)),
        ]
    return tuple(cases)


ATTENTION_CASES = (
    *_attention(),
    *_latents(),
    _cascade(_LLAMA_8B),
    _cascade(_QWEN_05B),
    _cascade(_WIDE),
    _merge(_LLAMA_8B),
    _merge(_PHI_2),
    _write(_LLAMA_8B),
    _write(_LLAMA_8B, FP16),
    _write(_LLAMA_8B, FP32),
    _write(_LLAMA_8B, cached=FP8),
    _write(_LLAMA_8B, cached=INT8),
    _write(_LLAMA_8B, cached=FP8, per_token=True),
    _write(_LLAMA_8B, cached=INT8, per_token=True),
    _write(_LLAMA_8B, norms=True),
    _write(_LLAMA_70B),
    _write(_QWEN_05B),
    _write(_PHI_2),
    _write(_GEMMA_2B),
    _write(_WIDE, norms=True),
    _copy(_LLAMA_8B, 32),
    _copy(_QWEN_05B, 24, INT8),
)
"""The cases."""

"""Catalog of public wrapper calls, as serving makes them, on tensors without memory.

Model names stand for their shapes. The catalog serves only :mod:`paged_kernels.aot`, which compiles
the cases listed here ahead of time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kernels._attention_cases import ATTENTION_CASES
from paged_kernels._cases import BF16, FP16, FP32, NAMES, Case, empty, ints
from paged_kernels._product_cases import PRODUCT_CASES
from paged_kernels._state_cases import STATE_CASES
from paged_kernels.logprobs import LogProbs, logprobs
from paged_kernels.penalties import Penalties, apply_penalties, count_tokens
from paged_kernels.rms_norm import add_rms_norm, rms_norm
from paged_kernels.sampling import SamplingState, sample
from paged_kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from paged_kernels.text_drafts import FIELDS, Texts, draw_drafts, keep_tokens, move_back
from paged_kernels.token_masks import apply_token_masks

__all__ = ["CASES", "Case"]


def _norm(width: int, dtype: torch.dtype = BF16, *, add: bool = True) -> Case:
    def call(num_tokens: int) -> Tensor:
        x, residual = (empty(num_tokens, width, dtype=dtype) for _ in range(2))
        weight = empty(width, dtype=dtype)
        if add:
            return add_rms_norm(x, residual, weight, 1e-5)
        return rms_norm(x, weight, 1e-5)

    return Case("add and norm" if add else "norm", f"{width} {NAMES[dtype]}", call)


def _activation(width: int, dtype: torch.dtype = BF16, *, gelu: bool = False) -> Case:
    def call(num_tokens: int) -> Tensor:
        gate_up = empty(num_tokens, 2 * width, dtype=dtype)
        return gelu_tanh_and_mul(gate_up) if gelu else silu_and_mul(gate_up)

    note = f"{width} {NAMES[dtype]}{' gelu' if gelu else ''}"
    return Case("activation", note, call)


def _sample(vocab: int, dtype: torch.dtype = BF16) -> Case:
    def call(num_seqs: int) -> Tensor:
        slots = {name: empty(256, dtype=FP32) for name in ("temperature", "top_p", "min_p")}
        state = SamplingState(**slots, top_k=ints(256), seed=empty(256, dtype=torch.int64))
        logits = empty(num_seqs, vocab, dtype=dtype)
        return sample(logits, ints(num_seqs), ints(num_seqs), state, ints(num_seqs))

    return Case("sampling", f"{vocab} tokens {NAMES[dtype]}", call)


def _logprobs(vocab: int, width: int, dtype: torch.dtype = BF16) -> Case:
    def call(num_seqs: int) -> LogProbs:
        logits = empty(num_seqs, vocab, dtype=dtype)
        return logprobs(logits, ints(num_seqs), ints(num_seqs), ints(256), width)

    return Case("log-probabilities", f"{width} of {vocab} tokens {NAMES[dtype]}", call)


def _penalties(vocab: int) -> Case:
    def call(num_seqs: int) -> None:
        slots = {name: empty(256, dtype=FP32) for name in ("repetition", "presence", "frequency")}
        penalties = Penalties(**slots, min_position=ints(256), stop_ids=ints(256, 8))
        logits = empty(num_seqs, vocab, dtype=FP32)
        counts, rows = ints(256, vocab), ints(num_seqs)
        inputs = empty(num_seqs, dtype=torch.int64)
        apply_penalties(logits, rows, ints(num_seqs), inputs, counts, penalties)
        count_tokens(counts, rows, ints(num_seqs), inputs)

    return Case("penalties", f"{vocab} tokens", call)


def _token_masks(vocab: int) -> Case:
    def call(num_seqs: int) -> None:
        logits = empty(num_seqs, vocab, dtype=FP32)
        apply_token_masks(logits, ints(num_seqs), ints(num_seqs, -(-vocab // 32)))

    return Case("token masks", f"{vocab} tokens", call)


def _text_drafts(max_tokens: int, max_length: int) -> Case:
    def call(num_seqs: int) -> None:
        texts = Texts(ints(256, max_length), *(ints(256) for _ in range(4)))
        slices, rows = ints(num_seqs, len(FIELDS)), ints(num_seqs * max_tokens)
        longs = empty(num_seqs * max_tokens, dtype=torch.int64)
        tables = ints(256, max_length // 16)
        move_back(
            *(slices, max_tokens, texts.num_wrong, rows, ints(num_seqs), rows, longs, tables),
            *(0, 1, 16),
        )
        draw_drafts(slices, max_tokens, max_length, texts, longs, longs, 1, 24)
        keep_tokens(texts, rows, rows, rows, longs)

    return Case("drafts from texts", f"{max_tokens} tokens of {max_length}", call)


CASES = {
    case.name: case
    for case in (
        *ATTENTION_CASES,
        _norm(4096),
        _norm(4096, add=False),
        _norm(4096, FP32),
        _norm(896),
        _norm(8192),
        _norm(18432),  # wider than one program holds
        _activation(14336),
        _activation(14336, FP32),
        _activation(4864),
        _activation(9216, gelu=True),  # Gemma 2 2B
        *PRODUCT_CASES,
        _sample(128256),
        _sample(128256, FP16),
        _sample(128256, FP32),
        _sample(151936),
        _logprobs(128256, 20),
        _logprobs(128256, 20, FP32),
        _penalties(128256),
        _token_masks(128256),
        _text_drafts(17, 32768),
        *STATE_CASES,
    )
}
"""Every case by its name."""

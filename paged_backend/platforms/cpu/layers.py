"""The functions of `platforms.portable.layers` for float32, as numba kernels.

Each kernel loads a row from memory once.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.checkpoint.moe import Routing, Scoring, SwiGLU
from paged_backend.checkpoint.shape import Activation
from paged_backend.models.linear import GatedMethod, LinearMethod, RowFunction
from paged_backend.platforms.cpu import head_products
from paged_backend.platforms.cpu.bf16_linear import (
    padded_rows,
    reads_bfloat16,
)
from paged_backend.platforms.cpu.kv_formats import to_bfloat16
from paged_backend.platforms.cpu.math import exp, gelu_tanh, normal_cdf, sigmoid, swiglu_row
from paged_backend.platforms.cpu.scored_experts import choose_by_score, take_largest
from paged_backend.platforms.cpu.states import rows_of
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    array_at,
    claim_rows,
    device_function,
    float_bits,
    float_of,
    floats,
    ints,
)

_ONE = np.float32(1.0)
_NO_LIMIT = float(np.finfo(np.float32).max)  # compiled code may assume that no number is infinite
_SCORINGS = (Scoring.SOFTMAX, Scoring.SIGMOID, Scoring.SOFTMAX_OF_TOP)
_SOFTMAX, _SIGMOID = 0, 1


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `platforms.portable.layers.rms_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), *x.shape, float_bits(eps))
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """See `platforms.portable.layers.layer_norm`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    places = x.data_ptr(), weight.data_ptr(), bias.data_ptr(), out.data_ptr()
    _layer_norm()(*places, *x.shape, float_bits(eps))
    return out


def add_norm(
    hidden: Tensor,
    linear: RowFunction,
    x: Tensor,
    weight: Tensor,
    eps: float,
    reader: LinearMethod | None = None,
) -> Tensor:
    """Add `linear(x)` to `hidden` [rows, size] in place; returns the norm of the sum."""
    linear.add_to(hidden, x)
    if not reads_bfloat16(reader):
        return rms_norm(hidden, weight, eps)
    total, out = hidden.contiguous(), padded_rows(*hidden.shape)
    places = total.data_ptr(), weight.data_ptr(), out.data_ptr()
    _rounded_rms_norm()(*places, *total.shape, float_bits(eps))
    return out


def norm_heads(qkv: Tensor, weight: Tensor, eps: float) -> None:
    """See `platforms.portable.layers.norm_heads`; `qkv` must be contiguous."""
    _norm_heads(qkv.data_ptr(), weight.data_ptr(), *qkv.shape, *weight.shape, float_bits(eps))


def gated(linear: RowFunction, x: Tensor, activation: Activation) -> Tensor:
    """See `platforms.portable.layers.gated`; the result is bf16 if `linear` computes it."""
    if isinstance(linear, GatedMethod):
        return linear.gated(x, activation)
    return _ACTIVATIONS[activation](linear(x))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `platforms.portable.layers.silu_and_mul`."""
    return activate(gate_up, SwiGLU())


def activate(gate_up: Tensor, activation: SwiGLU) -> Tensor:
    """Compute an activation [rows, size] for the two halves of each row of `gate_up`."""
    return _gated(gate_up, _swiglu, *activation_bits(activation))


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """See `platforms.portable.layers.gelu_tanh_and_mul`."""
    return _gated(gate_up, _gelu_tanh_and_mul())


_ACTIVATIONS = {Activation.SILU: silu_and_mul, Activation.GELU_TANH: gelu_tanh_and_mul}


def gelu(x: Tensor) -> Tensor:
    """See `platforms.portable.layers.gelu`."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _gelu()(x.data_ptr(), out.data_ptr(), *x.shape)
    return out


def _gated(gate_up: Tensor, kernel: ParallelKernel, *arguments: int) -> Tensor:
    gate_up = gate_up.contiguous()
    rows, size = len(gate_up), gate_up.shape[1] // 2
    out = torch.empty(rows, size)
    kernel(gate_up.data_ptr(), out.data_ptr(), rows, size, *arguments)
    return out


@cache
def activation_bits(activation: SwiGLU) -> tuple[int, ...]:
    """Return the parameters of an activation as arguments of a kernel."""
    limit = _NO_LIMIT if activation.limit is None else activation.limit
    numbers = activation.alpha, limit, activation.up_offset, activation.cubic
    return tuple(map(float_bits, numbers))


def add_gated(out: Tensor, x: Tensor, gate: Tensor) -> None:
    """See `platforms.portable.layers.add_gated`; all tensors must be contiguous."""
    _add_gated()(out.data_ptr(), x.data_ptr(), gate.data_ptr(), *out.shape)


def add(out: Tensor, x: Tensor) -> None:
    """See `platforms.portable.layers.add`; both tensors must be contiguous."""
    _add()(out.data_ptr(), x.data_ptr(), *out.shape)


def multiply_silu(out: Tensor, gate: Tensor) -> None:
    """See `platforms.portable.layers.multiply_silu`; `out` must be contiguous."""
    gate = rows_of(gate)
    _multiply_silu()(out.data_ptr(), gate.data_ptr(), *out.shape, gate.stride(0))


def multiply_sigmoid(out: Tensor, gate: Tensor) -> None:
    """See `platforms.portable.layers.multiply_sigmoid`; `out` must be contiguous."""
    gate = rows_of(gate)
    _multiply_sigmoid()(out.data_ptr(), gate.data_ptr(), *out.shape, gate.stride(0))


def choose_experts(
    logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """See `platforms.portable.layers.choose_experts`; `logits` must be contiguous."""
    if bias is not None or routing.groups is not None:
        return choose_by_score(logits, routing, bias)
    shape = len(logits), routing.num_experts_per_tok
    ids, weights = torch.empty(shape, dtype=torch.int32), torch.empty(shape)
    places = logits.data_ptr(), ids.data_ptr(), weights.data_ptr()
    scoring = _SCORINGS.index(routing.scoring)
    _choose_experts()(*places, *logits.shape, shape[1], scoring, int(routing.norm_topk_prob))
    if routing.scale != 1:
        weights *= routing.scale
    return ids, weights


def multiply_heads(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """See `platforms.portable.layers.multiply_heads`."""
    head_products.multiply_heads(out, x, weight)


@device_function
def _norm_scale(values: Any, eps_bits: int) -> Any:
    """Return the factor that scales `values` to a root mean square of 1."""
    total = np.float32(0.0)
    for i in range(len(values)):
        total += values[i] * values[i]
    return _ONE / np.sqrt(total / np.float32(len(values)) + float_of(eps_bits))


def _rms_norm_rows(arguments: Any) -> None:
    _, x_address, weight_address, out_address, rows, size, eps_bits = numba.carray(arguments, 7)
    x, out = floats(x_address, (rows, size)), floats(out_address, (rows, size))
    weight = floats(weight_address, size)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            scale = _norm_scale(x[row], eps_bits)
            for i in range(size):
                out[row, i] = x[row, i] * scale * weight[i]
        start, end = claim_rows(arguments, rows)


def _rounded_rms_norm_rows(arguments: Any) -> None:
    """The same, rounded to bf16."""
    _, x_address, weight_address, out_address, rows, size, eps_bits = numba.carray(arguments, 7)
    x, out = floats(x_address, (rows, size)), array_at(out_address, (rows, size), np.uint16)
    weight = floats(weight_address, size)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            scale = _norm_scale(x[row], eps_bits)
            for i in range(size):
                out[row, i] = to_bfloat16(x[row, i] * scale * weight[i], _ONE)
        start, end = claim_rows(arguments, rows)


def _layer_norm_rows(arguments: Any) -> None:
    _, x_address, weight_at, bias_at, out_address, rows, size, eps_bits = numba.carray(arguments, 8)
    x, out = floats(x_address, (rows, size)), floats(out_address, (rows, size))
    weight, bias = floats(weight_at, size), floats(bias_at, size)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            mean = np.float32(0.0)
            for i in range(size):
                mean += x[row, i]
            mean /= np.float32(size)
            for i in range(size):
                out[row, i] = x[row, i] - mean
            scale = _norm_scale(out[row], eps_bits)
            for i in range(size):
                out[row, i] = out[row, i] * scale * weight[i] + bias[i]
        start, end = claim_rows(arguments, rows)


def _norm_heads_rows(arguments: Any) -> None:
    _, address, weight_address, rows, size, heads, head_dim, eps_bits = numba.carray(arguments, 8)
    qkv, weight = floats(address, (rows, size)), floats(weight_address, (heads, head_dim))
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            for head in range(heads):
                values = qkv[row, head * head_dim : (head + 1) * head_dim]
                scale = _norm_scale(values, eps_bits)
                for i in range(head_dim):
                    values[i] *= scale * weight[head, i]
        start, end = claim_rows(arguments, rows)


def _swiglu_rows(arguments: Any) -> None:
    (_, address, out_address, rows, size, alpha, limit, up_offset, cubic) = numba.carray(
        arguments, 9
    )
    numbers = float_of(alpha), float_of(limit), float_of(up_offset), float_of(cubic)
    gate_up, out = floats(address, (rows, 2, size)), floats(out_address, (rows, size))
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            swiglu_row(gate_up[row], out[row], *numbers)
        start, end = claim_rows(arguments, rows)


def _gelu_tanh_and_mul_rows(arguments: Any) -> None:
    _, address, out_address, rows, size = numba.carray(arguments, 5)
    gate_up, out = floats(address, (rows, 2, size)), floats(out_address, (rows, size))
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            for i in range(size):
                out[row, i] = gelu_tanh(gate_up[row, 0, i]) * gate_up[row, 1, i]
        start, end = claim_rows(arguments, rows)


def _gelu_rows(arguments: Any) -> None:
    _, address, out_address, rows, size = numba.carray(arguments, 5)
    x, out = floats(address, (rows, size)), floats(out_address, (rows, size))
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            for i in range(size):
                out[row, i] = x[row, i] * normal_cdf(x[row, i])
        start, end = claim_rows(arguments, rows)


def _add_rows(arguments: Any) -> None:
    _, out_address, address, rows, size = numba.carray(arguments, 5)
    out, x = floats(out_address, (rows, size)), floats(address, (rows, size))
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            for i in range(size):
                out[row, i] += x[row, i]
        start, end = claim_rows(arguments, rows)


def _multiply_silu_rows(arguments: Any) -> None:
    _, out_address, gate_address, rows, size, gate_stride = numba.carray(arguments, 6)
    out = floats(out_address, (rows, size))
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            gate = floats(gate_address + row * gate_stride * 4, size)
            for i in range(size):
                out[row, i] *= gate[i] * sigmoid(gate[i])
        start, end = claim_rows(arguments, rows)


def _multiply_sigmoid_rows(arguments: Any) -> None:
    _, out_address, gate_address, rows, size, gate_stride = numba.carray(arguments, 6)
    out = floats(out_address, (rows, size))
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            gate = floats(gate_address + row * gate_stride * 4, size)
            for i in range(size):
                out[row, i] *= sigmoid(gate[i])
        start, end = claim_rows(arguments, rows)


def _add_gated_rows(arguments: Any) -> None:
    _, out_address, address, gate_address, rows, size = numba.carray(arguments, 6)
    out, x = floats(out_address, (rows, size)), floats(address, (rows, size))
    gate = floats(gate_address, rows)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            factor = sigmoid(gate[row])
            for i in range(size):
                out[row, i] += x[row, i] * factor
        start, end = claim_rows(arguments, rows)


@device_function
def _softmax_sum(logits: Any, largest: Any) -> Any:
    """Return the sum of exp(logit - largest)."""
    total = np.float32(0.0)
    for i in range(len(logits)):
        total += exp(logits[i] - largest)
    return total


def _choose_experts_of_rows(arguments: Any) -> None:
    _, address, ids_at, weights_at, rows, num_experts, top_k, scoring, norm = numba.carray(
        arguments, 9
    )
    all_logits = floats(address, (rows, num_experts))
    ids, weights = ints(ids_at, (rows, top_k)), floats(weights_at, (rows, top_k))
    taken, chosen = np.empty(num_experts, np.bool_), np.empty(top_k, np.float32)
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            logits = all_logits[row]
            taken[:] = False
            for rank in range(top_k):
                ids[row, rank] = take_largest(logits, taken)
                chosen[rank] = logits[ids[row, rank]]
            if scoring == _SIGMOID:
                for rank in range(top_k):
                    weights[row, rank] = sigmoid(chosen[rank])
            else:
                total = _softmax_sum(logits if scoring == _SOFTMAX else chosen, chosen[0])
                for rank in range(top_k):
                    weights[row, rank] = exp(chosen[rank] - chosen[0]) / total
            if norm:
                total = np.float32(0.0)
                for rank in range(top_k):
                    total += weights[row, rank]
                for rank in range(top_k):
                    weights[row, rank] /= total
        start, end = claim_rows(arguments, rows)


_rms_norm = ParallelKernel(_rms_norm_rows)
_norm_heads = ParallelKernel(_norm_heads_rows)
_swiglu = ParallelKernel(_swiglu_rows)
_add_gated = cache(partial(ParallelKernel, _add_gated_rows))
_add = cache(partial(ParallelKernel, _add_rows))
_multiply_silu = cache(partial(ParallelKernel, _multiply_silu_rows))
_multiply_sigmoid = cache(partial(ParallelKernel, _multiply_sigmoid_rows))
_choose_experts = cache(partial(ParallelKernel, _choose_experts_of_rows))
_rounded_rms_norm = cache(partial(ParallelKernel, _rounded_rms_norm_rows))
_layer_norm = cache(partial(ParallelKernel, _layer_norm_rows))
_gelu = cache(partial(ParallelKernel, _gelu_rows))
_gelu_tanh_and_mul = cache(partial(ParallelKernel, _gelu_tanh_and_mul_rows))

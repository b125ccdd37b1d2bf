"""Kernels of experts on the CPU: products of groups of rows, each with the weight of its expert.

A weight is read once per batch. Each sum is computed in the order of the depth, as in the product
of a linear layer, so a row's result does not depend on the other rows of its expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from paged_backend.checkpoint.moe import SwiGLU
from paged_backend.platforms.cpu.bf16_kernels import BFloat16Pairs, round_rows, unpack
from paged_backend.platforms.cpu.expert_groups import Groups
from paged_backend.platforms.cpu.layers import activation_bits
from paged_backend.platforms.cpu.math import swiglu
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    claim_rows,
    device_function,
    float_of,
    floats,
    inlined,
    longs,
)
from paged_backend.platforms.cpu.tiles import LANES, Float32, make_multiply

_PANELS = 4  # panels of a piece of work, at most
_WIDTH = _PANELS * LANES
_BLOCK = 48  # rows of sums that are kept before they are finished; a multiple of full tiles
_NUM_ARGUMENTS = 16  # the counter included


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of one projection of all experts.

    Attributes:
        panels: [num_experts, panels, depth / values, 16, values] float32 or bf16, where the number
            of values in a word is 1 or 2.
        bias: [num_experts, panels * 16] float32, or None.
    """

    panels: Tensor
    bias: Tensor | None


@device_function
def _finish_gate_up(words: Any, first: int, rows: int, column: int, sums: Any) -> None:
    """Store the activation of the sums of gate and up; their panels take turns."""
    out_at, num_pairs, inner = words[9], words[10], words[11]
    alpha, limit = float_of(words[12]), float_of(words[13])
    up_offset, cubic = float_of(words[14]), float_of(words[15])
    out = floats(out_at, (num_pairs, inner))
    for row in range(rows):
        for panel in range(0, sums.shape[1], 2 * LANES):
            values = sums[row, panel : panel + 2 * LANES]
            for lane in range(LANES):
                gate, up = values[lane], values[LANES + lane]
                values[lane] = swiglu(gate, up, alpha, limit, up_offset, cubic)
            start = (column + panel) // 2
            for lane in range(min(LANES, inner - start)):
                out[first + row, start + lane] = values[lane]


@device_function
def _finish_up(words: Any, first: int, rows: int, column: int, sums: Any) -> None:
    """Store max(sum, 0) ** 2 of the sums of experts without a gate."""
    out_at, num_pairs, inner = words[9], words[10], words[11]
    out = floats(out_at, (num_pairs, inner))
    for row in range(rows):
        for i in range(min(sums.shape[1], inner - column)):
            value = max(sums[row, i], np.float32(0.0))
            out[first + row, column + i] = value * value


@device_function
def finish_down(words: Any, first: int, rows: int, column: int, sums: Any) -> None:
    """Store the sums, times the weights of their pairs, in the order of the batch."""
    out_at, num_pairs, hidden = words[9], words[10], words[11]
    out = floats(out_at, (num_pairs, hidden))
    pairs, weights = longs(words[12], num_pairs), floats(words[13], num_pairs)
    count = min(sums.shape[1], hidden - column)
    for row in range(rows):
        pair = pairs[first + row]
        for i in range(count):
            out[pair, column + i] = sums[row, i] * weights[pair]


def _make_kernel(load: Any, multiply: Any, finish: Any) -> Any:
    """Return the device function that computes all pieces of a product of groups.

    A piece is some panels of one expert, and all of its rows.

    Args:
        load: returns the address of the words of some panels; see `_in_place`.
        multiply: the product of tiles.
        finish: stores the sums of some rows and panels.
    """

    @inlined
    def compute_pieces(arguments: Any) -> None:
        words = numba.carray(arguments, _NUM_ARGUMENTS)
        x, panels_at, bias_at, bounds_at, counts_at = words[1:6]
        depth, num_panels, word_bytes = words[6:9]
        first_group, end = longs(counts_at, 2)[0], longs(counts_at, 2)[1]
        bounds = longs(bounds_at, (end, 3))
        pieces = (num_panels + _PANELS - 1) // _PANELS
        all_sums = np.empty((_BLOCK, _WIDTH), np.float32)
        memory = np.empty(_WIDTH * depth if word_bytes == 2 else 0, np.uint32)
        piece = claim(arguments)
        while piece < (end - first_group) * pieces:
            next_piece = claim(arguments)
            following = np.int64(0)
            if next_piece < (end - first_group) * pieces:
                expert = bounds[first_group + next_piece // pieces, 0]
                place = expert * num_panels + next_piece % pieces * _PANELS
                following = panels_at + place * LANES * depth * word_bytes
            group = bounds[first_group + piece // pieces]
            panel = piece % pieces * _PANELS
            width = min(_PANELS, num_panels - panel) * LANES
            weights = panels_at + (group[0] * num_panels + panel) * LANES * depth * word_bytes
            weights = load(weights, width * depth, memory)
            bias = bias_at
            if bias_at != 0:
                bias += (group[0] * num_panels + panel) * LANES * 4
            for block in range(0, group[2], _BLOCK):
                first, rows = group[1] + block, min(_BLOCK, group[2] - block)
                sums = all_sums[:rows, :width]
                multiply(
                    *(rows, width, x + first * depth * 4, depth),
                    *(weights, LANES, LANES * depth),
                    *(np.int64(all_sums.ctypes.data), _WIDTH, depth, bias, np.int64(0), following),
                )
                finish(words, first, rows, panel * LANES, sums)
            piece = next_piece

    return compute_pieces


@device_function
def _in_place(panels: int, numbers: int, memory: Any) -> Any:
    """Return the address of panels that need no change."""
    return panels


_float32, _pairs = (make_multiply(kind, streams=True) for kind in (Float32(), BFloat16Pairs()))
_unpacked = make_multiply(Float32())
_gate_up_float32 = _make_kernel(_in_place, _float32, _finish_gate_up)
_up_float32 = _make_kernel(_in_place, _float32, _finish_up)
_down_float32 = _make_kernel(_in_place, _float32, finish_down)
_gate_up_pairs = _make_kernel(_in_place, _pairs, _finish_gate_up)
_up_pairs = _make_kernel(_in_place, _pairs, _finish_up)
_down_pairs = _make_kernel(_in_place, _pairs, finish_down)
_gate_up_unpacked = _make_kernel(unpack, _unpacked, _finish_gate_up)
_up_unpacked = _make_kernel(unpack, _unpacked, _finish_up)
_down_unpacked = _make_kernel(unpack, _unpacked, finish_down)


# Compiled kernels are kept on the disk by the names of functions of this module.
def _compute_gate_up_float32(arguments: Any) -> None:
    _gate_up_float32(arguments)


def _compute_down_float32(arguments: Any) -> None:
    _down_float32(arguments)


def _compute_up_float32(arguments: Any) -> None:
    _up_float32(arguments)


def _compute_up_pairs(arguments: Any) -> None:
    _up_pairs(arguments)


def _compute_up_unpacked(arguments: Any) -> None:
    _up_unpacked(arguments)


def _compute_gate_up_pairs(arguments: Any) -> None:
    _gate_up_pairs(arguments)


def _compute_down_pairs(arguments: Any) -> None:
    _down_pairs(arguments)


def _compute_gate_up_unpacked(arguments: Any) -> None:
    _gate_up_unpacked(arguments)


def _compute_down_unpacked(arguments: Any) -> None:
    _down_unpacked(arguments)


def _add_ranks_of_rows(arguments: Any) -> None:
    _, outputs_at, out_at, rows, top_k, hidden = numba.carray(arguments, 6)
    outputs, out = floats(outputs_at, (rows, top_k, hidden)), floats(out_at, (rows, hidden))
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            for i in range(hidden):
                out[row, i] = outputs[row, 0, i]
            for rank in range(1, top_k):
                for i in range(hidden):
                    out[row, i] += outputs[row, rank, i]
        start, end = claim_rows(arguments, rows)


def _compiled(function: Callable[[Any], None]) -> Callable[[], ParallelKernel]:
    return functools.cache(functools.partial(ParallelKernel, function))


@dataclass(frozen=True, slots=True)
class Product:
    """The kernels of one projection, which are compiled when they are first needed.

    Attributes:
        float32: kernel for float32 weights.
        pairs: kernel for bf16 weights and experts with few rows.
        unpacked: kernel for bf16 weights and experts with many rows: see `Groups`.
    """

    float32: Callable[[], ParallelKernel]
    pairs: Callable[[], ParallelKernel]
    unpacked: Callable[[], ParallelKernel]

    def __call__(
        self, x: Tensor, weights: ExpertWeights, groups: Groups, out: Tensor, *constants: int
    ) -> None:
        """Multiply the rows `x` [num_pairs, inputs] float32, which are sorted by expert.

        Args:
            x: rounded to bf16 first if the weights are bf16.
            weights: weights of the projection.
            groups: the rows of each expert.
            out: [num_pairs, outputs] float32.
            constants: the last arguments of the kernel.
        """
        panels, few = weights.panels, groups.counts.data_ptr()
        if panels.dtype == torch.float32:
            self._run(self.float32(), x, weights, groups, few, 4, out, constants)
            return
        rounded = round_rows(x, len(x), panels.shape[2] * panels.shape[4])
        self._run(self.pairs(), rounded, weights, groups, few, 4, out, constants)
        if groups.may_have_many:
            values = torch.empty(rounded.shape).copy_(rounded)
            self._run(self.unpacked(), values, weights, groups, few + 8, 2, out, constants)

    @staticmethod
    def _run(
        kernel: ParallelKernel,
        x: Tensor,
        weights: ExpertWeights,
        groups: Groups,
        counts_at: int,
        word_bytes: int,
        out: Tensor,
        constants: tuple[int, ...],
    ) -> None:
        """Compute the groups from the number that is at `counts_at` to the next one there."""
        depth, num_panels = x.shape[1] * x.element_size() // 4, weights.panels.shape[1]
        bias_at = 0 if weights.bias is None else weights.bias.data_ptr()
        kernel(
            *(x.data_ptr(), weights.panels.data_ptr(), bias_at),
            *(groups.bounds.data_ptr(), counts_at, depth, num_panels, word_bytes),
            *(out.data_ptr(), *out.shape, *constants),
        )


_gate_up = Product(
    _compiled(_compute_gate_up_float32),
    _compiled(_compute_gate_up_pairs),
    _compiled(_compute_gate_up_unpacked),
)
_up = Product(
    _compiled(_compute_up_float32),
    _compiled(_compute_up_pairs),
    _compiled(_compute_up_unpacked),
)
_down = Product(
    _compiled(_compute_down_float32),
    _compiled(_compute_down_pairs),
    _compiled(_compute_down_unpacked),
)
_add_ranks = _compiled(_add_ranks_of_rows)


def activate(
    x: Tensor, gate_up: ExpertWeights, inner: int, groups: Groups, activation: SwiGLU | None
) -> Tensor:
    """Compute the activation [num_pairs, inner] of the rows `x` [num_pairs, hidden_size].

    Rows are sorted by expert, in `x` and in the result. Panels of gate and up alternate in
    memory. Without an activation, there are panels of up only, and max(up, 0) ** 2 is computed.
    """
    out = torch.empty(len(x), inner)
    if activation is None:
        _up(x, gate_up, groups, out, 0, 0, 0, 0)
    else:
        _gate_up(x, gate_up, groups, out, *activation_bits(activation))
    return out


def add_experts(
    x: Tensor,
    down: ExpertWeights,
    hidden: int,
    groups: Groups,
    expert_weights: Tensor,
    *,
    has_absent: bool = False,
) -> Tensor:
    """Compute the weighted sums [rows, hidden] of the down projections of `x` [num_pairs, inner].

    The rows of `x` are sorted by expert. `expert_weights` is [rows, num_experts_per_tok] float32,
    and a sum is computed in the order of its columns. With `has_absent`, pairs may be in no group.
    """
    outputs = torch.empty(len(x), hidden)
    if has_absent:
        outputs.zero_()
    constants = groups.pairs.data_ptr(), expert_weights.data_ptr(), 0, 0
    _down(x, down, groups, outputs, *constants)
    return add_ranks(outputs, *expert_weights.shape)


def add_ranks(outputs: Tensor, rows: int, top_k: int) -> Tensor:
    """Return the sums [rows, hidden] of `outputs` [rows * top_k, hidden], in the ranks' order."""
    out = torch.empty(rows, outputs.shape[1])
    _add_ranks()(outputs.data_ptr(), out.data_ptr(), rows, top_k, outputs.shape[1])
    return out

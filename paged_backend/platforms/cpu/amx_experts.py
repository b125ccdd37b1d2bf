"""Kernels of experts on the AMX units of a CPU: products in bf16 with float32 sums.

The rows of an expert are multiplied 32 at a time. Its last tiles hold rows of the next expert, too;
their sums are not used. Each sum is computed in the order of the depth, so a row's result does not
depend on the other rows of its expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from paged_backend.checkpoint.moe import SwiGLU
from paged_backend.platforms.cpu import amx
from paged_backend.platforms.cpu.amx import (
    DEPTH,
    LANES,
    ROWS,
    TILE_BYTES,
    TILE_CONFIG,
    release_tiles,
    use_tiles,
)
from paged_backend.platforms.cpu.amx_products import Matrix, multiply_block
from paged_backend.platforms.cpu.expert_groups import Groups
from paged_backend.platforms.cpu.expert_kernels import ExpertWeights, add_ranks, finish_down
from paged_backend.platforms.cpu.layers import activation_bits
from paged_backend.platforms.cpu.llvm import INT64
from paged_backend.platforms.cpu.math import emit_maximum, emit_swiglu
from paged_backend.platforms.cpu.states import prefetch
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim,
    device_function,
    float_of,
    inlined,
    longs,
)
from paged_backend.platforms.cpu.vectors import FLOATS, load, splat, store_bfloat16

SPARE_ROWS = ROWS - 1
"""Rows of memory that tiles read after the last row."""

_PANELS = 4  # panels of a piece of work, at most
_WIDTH = _PANELS * LANES
_BLOCK = 2 * ROWS  # rows of sums that are kept before they are finished
_NUM_ARGUMENTS = 16  # the counter included


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _gate(
    context: Any,
    source: Any,
    target: Any,
    alpha: Any,
    limit: Any,
    up_offset: Any,
    cubic: Any,
) -> Any:
    """Store the activation of a vector of gate and of the vector of up that follows it, in bf16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        gate, up = (load(builder, args[0], INT64(index)) for index in (0, 1))
        numbers = (splat(builder, number) for number in args[2:])
        store_bfloat16(builder, emit_swiglu(builder, gate, up, *numbers), args[1], INT64(0))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2, *[types.float32] * 4), generate


@intrinsic  # type: ignore[untyped-decorator]  # numba has no types
def _square(context: Any, source: Any, target: Any) -> Any:
    """Store max(up, 0) ** 2 of a vector in bf16."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        zeros = ir.Constant(FLOATS, [0.0] * LANES)
        up = emit_maximum(builder, load(builder, args[0], INT64(0)), zeros)
        store_bfloat16(builder, builder.fmul(up, up), args[1], INT64(0))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@device_function
def _finish_gate_up(words: Any, first: int, rows: int, column: int, sums: Any) -> None:
    """Store the activation of the sums of gate and up; their panels take turns."""
    out, columns = words[9], words[11]
    alpha, limit = float_of(words[12]), float_of(words[13])
    up_offset, cubic = float_of(words[14]), float_of(words[15])
    for row in range(rows):
        for panel in range(0, sums.shape[1], 2 * LANES):
            source = np.int64(sums.ctypes.data) + (row * _WIDTH + panel) * 4
            target = out + ((first + row) * columns + (column + panel) // 2) * 2
            _gate(source, target, alpha, limit, up_offset, cubic)


@device_function
def _finish_up(words: Any, first: int, rows: int, column: int, sums: Any) -> None:
    """Store max(sum, 0) ** 2 of the sums of experts without a gate."""
    out, columns = words[9], words[11]
    for row in range(rows):
        for panel in range(0, sums.shape[1], LANES):
            source = np.int64(sums.ctypes.data) + (row * _WIDTH + panel) * 4
            _square(source, out + ((first + row) * columns + column + panel) * 2)


@device_function
def _prefetch_nothing(words: Any, first: int, rows: int, column: int, width: int) -> None:
    """The results of neighboring rows lie together, so the processor finds them by itself."""


@device_function
def _prefetch_results(words: Any, first: int, rows: int, column: int, width: int) -> None:
    """Begin to load the memory of `finish_down`'s results, which are far from each other."""
    out, num_pairs, hidden = words[9], words[10], words[11]
    pairs = longs(words[12], num_pairs)
    for row in range(first, first + rows):
        prefetch(out + (pairs[row] * hidden + column) * 4, width)


def _make_kernel(finish: Any, prefetch_results: Any) -> Any:
    """Return the device function that computes all pieces of a product of groups.

    A piece is some panels of one expert, and all of its rows.

    Args:
        finish: stores the sums of some rows and panels.
        prefetch_results: begins to load the memory to which `finish` will store.
    """

    @inlined
    def compute_pieces(arguments: Any) -> None:
        words = numba.carray(arguments, _NUM_ARGUMENTS)
        x, panels_at, bias_at, bounds_at, counts_at = words[1:6]
        steps, num_panels = words[6:8]
        num_groups = longs(counts_at, 2)[1]
        bounds = longs(bounds_at, (num_groups, 3))
        pieces = (num_panels + _PANELS - 1) // _PANELS
        row_bytes, panel_bytes = steps * 2 * DEPTH, steps * TILE_BYTES
        memory = np.empty((_BLOCK, _WIDTH), np.float32)
        sums = Matrix(np.int64(memory.ctypes.data), np.int64(_WIDTH * 4))
        use_tiles(words[8])
        piece = claim(arguments)
        while piece < num_groups * pieces:
            expert, start, count = bounds[piece // pieces]
            panel = piece % pieces * _PANELS
            here, place = min(_PANELS, num_panels - panel), expert * num_panels + panel
            weights = Matrix(panels_at + place * panel_bytes, panel_bytes)
            bias = Matrix(bias_at, np.int64(0))
            if bias_at != 0:
                bias = Matrix(bias_at + place * LANES * 4, np.int64(0))
            for block in range(0, count, _BLOCK):
                first, rows = start + block, min(_BLOCK, count - block)
                prefetch_results(words, first, rows, panel * LANES, here * LANES)
                source, row_tiles = Matrix(x + first * row_bytes, row_bytes), 1 + (rows > ROWS)
                multiply_block(1, row_tiles, here, source, weights, sums, bias, block == 0)
                finish(words, first, rows, panel * LANES, memory[:rows, : here * LANES])
            piece = claim(arguments)
        memory[0, 0] = 0  # see `amx_products`
        release_tiles()

    return compute_pieces


_gate_up = _make_kernel(_finish_gate_up, _prefetch_nothing)
_up = _make_kernel(_finish_up, _prefetch_nothing)
_down = _make_kernel(finish_down, _prefetch_results)


# Compiled kernels are kept on the disk by the names of functions of this module.
def _compute_gate_up(arguments: Any) -> None:
    _gate_up(arguments)


def _compute_up(arguments: Any) -> None:
    _up(arguments)


def _compute_down(arguments: Any) -> None:
    _down(arguments)


@functools.cache
def _kernel(function: Callable[[Any], None]) -> ParallelKernel:
    if not amx.has_amx():  # the first instruction would end the process
        raise RuntimeError("this CPU has no AMX with bf16, or the kernel does not allow it")
    return ParallelKernel(function)


def _run(
    function: Callable[[Any], None],
    x: Tensor,
    weights: ExpertWeights,
    groups: Groups,
    out: Tensor,
    *constants: int,
) -> None:
    """Multiply the rows `x`, which are sorted by expert, and finish the sums into `out`."""
    num_panels, steps = weights.panels.shape[1], x.shape[1] // DEPTH
    bias_at = 0 if weights.bias is None else weights.bias.data_ptr()
    _kernel(function)(
        *(x.data_ptr(), weights.panels.data_ptr(), bias_at),
        *(groups.bounds.data_ptr(), groups.counts.data_ptr(), steps, num_panels),
        *(TILE_CONFIG.ctypes.data, out.data_ptr(), *out.shape, *constants),
    )


def activate(
    x: Tensor, gate_up: ExpertWeights, groups: Groups, activation: SwiGLU | None
) -> Tensor:
    """Compute the activation of rows in bf16.

    Args:
        x: [num_pairs + SPARE_ROWS, depth] bf16, sorted by expert; the depth is a multiple of DEPTH.
        gate_up: panels of gate and up take turns, a multiple of 4 panels. Without an activation,
            there are panels of up only, a multiple of 2.
        groups: the rows of each expert. They count all experts as those with few pairs.
        activation: activation of the gate; None for max(up, 0) ** 2.

    Returns:
        [num_pairs + SPARE_ROWS, columns] bf16, in the order of `x`, where the columns are a
        multiple of DEPTH. The spare rows may hold anything.
    """
    columns = gate_up.panels.shape[1] * LANES // (1 if activation is None else 2)
    out = torch.empty(len(x), columns, dtype=torch.bfloat16)
    if activation is None:
        _run(_compute_up, x, gate_up, groups, out, 0, 0, 0, 0)
    else:
        _run(_compute_gate_up, x, gate_up, groups, out, *activation_bits(activation))
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
    """Compute the weighted sums [rows, hidden] of the down projections of `x` [.., depth] bf16.

    The rows of `x` are as `activate` returns them. See `expert_kernels.add_experts`.
    """
    outputs = torch.empty(len(groups.pairs), hidden)
    if has_absent:
        outputs.zero_()
    places = groups.pairs.data_ptr(), expert_weights.data_ptr()
    _run(_compute_down, x, down, groups, outputs, *places, 0, 0)
    return add_ranks(outputs, *expert_weights.shape)

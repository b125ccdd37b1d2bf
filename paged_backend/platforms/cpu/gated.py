"""Parts that linear layers for gate and up, the halves of a gated MLP, have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from paged_backend.checkpoint.shape import Activation
from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.cpu.in_place import Initial, InPlaceProduct
from paged_backend.platforms.cpu.llvm import INT64
from paged_backend.platforms.cpu.math import emit_gelu_tanh, emit_silu
from paged_backend.platforms.cpu.threads import (
    ParallelKernel,
    claim_rows,
    device_variant,
    floats,
)
from paged_backend.platforms.cpu.tiles import LANES
from paged_backend.platforms.cpu.vectors import load

_SILU = 0


def index_of(activation: Activation) -> int:
    """Return the number of an activation for the kernels."""
    return int(activation is not Activation.SILU)


class GatedLinear(InPlaceProduct, ABC):
    """The projections gate and up of an MLP; their panels of LANES outputs take turns.

    See :class:`~paged_backend.models.linear.GatedMethod`.
    """

    _spec: LinearSpec

    def initial_sums(self, rows: int) -> Tensor:
        """Return the bias of each row, or zeros: [rows, outputs] float32, panels in turns."""
        sums = torch.empty(rows, self._num_outputs)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        _begin_rows()(bias, sums.data_ptr(), *sums.shape)
        return sums

    def gated(self, x: Tensor, activation: Activation, sums: Tensor | None = None) -> Tensor:
        """Compute act(gate) * up [rows, outputs / 2]; see `GatedMethod.gated`."""
        if sums is not None:
            return self._gate(x, activation, Initial(sums.data_ptr(), sums.shape[1]))
        return self._gate(x, activation, self._bias_of_rows())

    @abstractmethod
    def _gate(self, x: Tensor, activation: Activation, initial: Initial) -> Tensor:
        """Compute `gated` with sums that begin with `initial`."""

    def _stored(self, values: Tensor) -> Tensor:
        """Return the rows of a weight, or a bias, in the order of the panels."""
        halves = values.view(2, -1, LANES, *values.shape[1:])
        return halves.transpose(0, 1).reshape(values.shape)

    def __call__(self, x: Tensor) -> Tensor:
        """Compute gate and up [rows, outputs] float32 for `x` [rows, inputs]."""
        out = super().__call__(x)
        panels = self._spec.outputs // (2 * LANES)
        return out.view(len(x), panels, 2, LANES).transpose(1, 2).reshape(out.shape)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)`, bias included, to `out` [rows, outputs] in place."""
        out += self(x)


def _begin_sums(arguments: Any) -> None:
    """Write a bias [size] float32 into rows of float32, or zeros if its address is 0."""
    _, bias_at, out_at, rows, size = numba.carray(arguments, 5)
    out = floats(out_at, (rows, size))
    start, end = claim_rows(arguments, rows)
    while start < end:
        for row in range(start, end):
            if bias_at == 0:
                out[row] = 0
            else:
                out[row] = floats(bias_at, size)
        start, end = claim_rows(arguments, rows)


_begin_rows = cache(partial(ParallelKernel, _begin_sums))


def make_gate(name: str, number: Any, store: Callable[..., None]) -> Any:
    """Return the device function that stores act(gate) * up, for the columns of some panels.

    Args:
        name: part of the name of the compiled function; unique to the type.
        number: the numpy type of a stored number.
        store: (builder, vector, address, index), emits that a vector of float32 is stored.
    """
    gate_with_silu, gate_with_gelu = (_make_gate(e, store) for e in (emit_silu, emit_gelu_tanh))
    num_bytes = np.dtype(number).itemsize

    @device_variant(name)
    def gate(sums: int, width: int, out: int, columns: int, size: Any, activation: int) -> None:
        """Store the results for rows of sums, of gate and up in turns.

        Args:
            sums: the address of [rows, width] float32.
            width: the number of sums in a row of memory.
            out: the address of the first result.
            columns: the number of results in a row of memory.
            size: the number of rows, and of pairs of panels.
            activation: see `index_of`.
        """
        rows, pairs = size
        for row in range(rows):
            for pair in range(pairs):
                source = sums + (row * width + pair * 2 * LANES) * 4
                target = out + (row * columns + pair * LANES) * num_bytes
                if activation == _SILU:
                    gate_with_silu(source, target)
                else:
                    gate_with_gelu(source, target)

    return gate


def _make_gate(emit: Callable[..., Any], store: Callable[..., None]) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]  # numba has no types
    def gate(context: Any, source: Any, target: Any) -> Any:
        """Store the result for a vector of gate and the vector of up that follows it."""

        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            values, up = (load(builder, args[0], INT64(index)) for index in (0, 1))
            result = builder.fmul(emit(builder, values), up, flags=("fast",))
            store(builder, result, args[1], INT64(0))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    return gate

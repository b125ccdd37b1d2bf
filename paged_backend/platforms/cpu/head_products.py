"""Products of each head's numbers with the weight of this head, on the CPU.

Each sum is computed in the order of the depth, so that a row's result does not depend on the other
rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numba
import torch.nn.functional as F
from torch import Tensor

from paged_backend.platforms.cpu.threads import ParallelKernel, claim
from paged_backend.platforms.cpu.tiles import LANES, Float32, make_multiply

_WIDTH = 4 * LANES  # outputs of a piece of work
_NARROW = 8  # the kernel computes a multiple of this many outputs


def multiply_heads(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """See `platforms.portable.layers.multiply_heads`; all tensors are float32."""
    rows, (heads, inputs, outputs) = len(x), weight.shape
    if outputs % _NARROW:
        padded = -(-outputs // _NARROW) * _NARROW
        whole = out.new_empty(rows, heads, padded)
        multiply_heads(whole, x, F.pad(weight, (0, padded - outputs)))
        out.copy_(whole[..., :outputs])
        return
    strides = *x.stride()[:2], *out.stride()[:2]
    places = x.data_ptr(), weight.data_ptr(), out.data_ptr()
    _product()(*places, rows, heads, inputs, outputs, *strides)


_multiply = make_multiply(Float32(), streams=True)


def _multiply_pieces(arguments: Any) -> None:
    """Compute some outputs of a head for all rows, then those of the next piece."""
    _, x, weight, out, rows, heads, inputs, outputs, x_row, x_head, out_row, out_head = (
        numba.carray(arguments, 12)
    )
    pieces = (outputs + _WIDTH - 1) // _WIDTH
    piece = claim(arguments)
    while piece < heads * pieces:
        head, column = piece // pieces, piece % pieces * _WIDTH
        _multiply(
            *(rows, min(_WIDTH, outputs - column), x + head * x_head * 4, x_row),
            *(weight + (head * inputs * outputs + column) * 4, outputs, LANES),
            *(out + (head * out_head + column) * 4, out_row, inputs, 0, 0),
        )
        piece = claim(arguments)


@cache
def _product() -> ParallelKernel:
    return ParallelKernel(_multiply_pieces)

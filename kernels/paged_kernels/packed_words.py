"""The order in which kernels read weights of 4 or 8 bits from 32-bit words.

A block of a row is 16 words: 128 numbers of 4 bits, or 64 of 8 bits, in parts of 32 columns. Column
2 * w + h of part p is in word w, from bit bits * p + 16 * h on.
"""

from __future__ import annotations

import torch
from torch import Tensor

PART = 32
"""Columns of a part: those that are unpacked, and multiplied, together."""

_WORDS = PART // 2  # words of a block


def num_words(width: int, bits: int) -> int:
    """Return the number of words of a row of `width` numbers; the last block may be padded."""
    return -(-width // _columns(bits)) * _WORDS


def pack_words(numbers: Tensor, bits: int) -> Tensor:
    """Pack rows of numbers.

    Args:
        numbers: [N, width] of integers from 0 to 2**bits - 1.
        bits: 4 or 8.

    Returns:
        [N, :func:`num_words`] int32. Numbers beyond the width are 0.
    """
    columns = _columns(bits)
    padded = torch.nn.functional.pad(numbers.to(torch.uint8), (0, -numbers.shape[1] % columns))
    blocks = padded.view(len(numbers), padded.shape[1] // columns, 16 // bits, PART)
    if bits == 4:
        blocks = blocks[:, :, 0::2] | blocks[:, :, 1::2] << 4
    # A column has two bytes of a word now; a view of bytes needs no wider numbers.
    words = blocks.transpose(2, 3).contiguous().view(*blocks.shape[:2], 2 * PART)
    return words.view(torch.int32).flatten(1)


def unpack_words(packed: Tensor, bits: int, width: int) -> Tensor:
    """Return the first `width` numbers of each row, [N, width] uint8.

    Args:
        packed: [N, :func:`num_words`] int32, as `pack_words` returns.
        bits: 4 or 8.
        width: number of columns.
    """
    num_blocks = packed.shape[1] // _WORDS
    halves = packed.view(len(packed), num_blocks, _WORDS).view(torch.uint8)
    blocks = halves.view(len(packed), num_blocks, PART, 2).transpose(2, 3)
    if bits == 4:
        blocks = torch.stack((blocks & 15, blocks >> 4), 3)
    rows: Tensor = blocks.reshape(len(packed), num_blocks * _columns(bits))
    return rows[:, :width]


def _columns(bits: int) -> int:
    """Return the number of columns of a block."""
    return PART * 16 // bits

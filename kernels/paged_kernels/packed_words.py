"""The order in which kernels read weights of 4 or 8 bits from 32-bit words.

A block of a row is 16 words: 128 numbers of 4 bits, or 64 of 8 bits, in parts of 32 columns. Column
2 * w + h of part p is in word w, from bit bits * p + 16 * h on.
"""

from __future__ import annotations

from itertools import product

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
        numbers: [N, width] of any integers from 0 to 2**bits - 1.
        bits: 4 or 8.

    Returns:
        [N, :func:`num_words`] int32. Numbers beyond the width are 0.
    """
    padding = -numbers.shape[1] % _columns(bits)
    blocks = torch.nn.functional.pad(numbers, (0, padding))
    parts = blocks.view(len(numbers), -1, 16 // bits, _WORDS, 2)
    shape = len(numbers), parts.shape[1], _WORDS
    words = torch.zeros(shape, dtype=torch.int32, device=blocks.device)
    for part, half in product(range(16 // bits), range(2)):
        words |= parts[:, :, part, :, half].int() << (bits * part + 16 * half)
    return words.flatten(1)


def unpack_words(packed: Tensor, bits: int, width: int) -> Tensor:
    """Return the first `width` numbers of each row, [N, width] uint8.

    Args:
        packed: [N, :func:`num_words`] int32, as `pack_words` returns.
        bits: 4 or 8.
        width: number of columns.
    """
    words = packed.view(len(packed), -1, _WORDS)
    numbers = [
        words >> (bits * part + 16 * half) & (2**bits - 1)
        for part, half in product(range(16 // bits), range(2))
    ]
    parts = torch.stack(numbers, -1).to(torch.uint8).unflatten(-1, (-1, 2))
    rows: Tensor = parts.transpose(2, 3).flatten(1)
    return rows[:, :width]


def _columns(bits: int) -> int:
    """Return the number of columns of a block."""
    return PART * 16 // bits

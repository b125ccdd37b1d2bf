"""Numbers of a few bits, packed in sequence into 32-bit words, low bits first."""

from __future__ import annotations

import torch
from torch import Tensor


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Return the first `count` numbers [rows, count] int16 of each row of int32 words.

    Number i begins at bit i * bits of the row, so it may lie in two words.
    """
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        parts = words.contiguous().view(torch.uint8).unsqueeze(2) >> shifts
        numbers: Tensor = (parts & (2**bits - 1)).flatten(1)[:, :count]
    else:
        start = torch.arange(count) * bits
        word, shift = start // 32, start % 32
        unsigned = words.long() & 0xFFFFFFFF
        following = torch.nn.functional.pad(unsigned, (0, 1))[:, word + 1]
        numbers = (unsigned[:, word] >> shift | following << (32 - shift)) & (2**bits - 1)
    return numbers.to(torch.int16)


def num_words(count: int, bits: int) -> int:
    """Return the number of 32-bit words that hold `count` numbers."""
    return -(-count * bits // 32)


def pack_int4(values: Tensor) -> Tensor:
    """Pack rows of numbers from 0 to 15 into int32 words, as `unpack` reads them."""
    numbers = torch.nn.functional.pad(values.to(torch.uint8), (0, -values.shape[1] % 8))
    pairs = numbers.view(len(numbers), -1, 2)
    return (pairs[:, :, 0] | pairs[:, :, 1] << 4).contiguous().view(torch.int32)

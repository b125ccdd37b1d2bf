"""The layout of 4-bit weights: eight to an int32, the first in the lowest bits.

It equals `weight_packed` in checkpoints that compressed-tensors wrote as `pack-quantized`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

PER_WORD = 8


def pack_int4(values: Tensor) -> Tensor:
    """Pack numbers from 0 to 15 along the last dimension, padded with zeros to whole words.

    Args:
        values: [N, K], any integer dtype.

    Returns:
        [N, ceil(K / 8)] int32. Element k of a row is in bits 4 * (k % 8) to 4 * (k % 8) + 3 of
        word k // 8.
    """
    padded = F.pad(values.to(torch.int64), (0, -values.shape[1] % PER_WORD))
    nibbles = padded.view(len(values), -1, PER_WORD)
    words = (nibbles << _shifts(values.device)).sum(-1)
    return torch.where(words < 2**31, words, words - 2**32).to(torch.int32)


def unpack_int4(packed: Tensor, width: int) -> Tensor:
    """Return the first `width` numbers of each row, as [N, width] uint8: undo `pack_int4`."""
    nibbles = (packed.unsqueeze(-1) >> _shifts(packed.device)) & 15
    return nibbles.flatten(1)[:, :width].to(torch.uint8)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(0, 32, 4, dtype=torch.int32, device=device)

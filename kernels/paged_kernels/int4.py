"""The layout of 4-bit zero points: eight to an int32, the first in the lowest bits.

It equals `weight_packed` in checkpoints that compressed-tensors wrote as `pack-quantized`. Weights
are packed in another order for kernels (`packed_words`).
"""

from __future__ import annotations

import torch
from torch import Tensor

PER_WORD = 8


def unpack_int4(packed: Tensor, width: int) -> Tensor:
    """Return the first `width` numbers of each row, as [N, width] uint8.

    Args:
        packed: [N, ceil(width / 8)] int32. Element k of a row is in bits 4 * (k % 8) to
            4 * (k % 8) + 3 of word k // 8.
        width: number of elements of a row.
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    nibbles = (packed.unsqueeze(-1) >> shifts) & 15
    return nibbles.flatten(1)[:, :width].to(torch.uint8)

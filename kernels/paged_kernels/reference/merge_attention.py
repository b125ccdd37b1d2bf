"""Reference for merging two attention results over different keys, in float64."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_attention(first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor) -> Tensor:
    """Reference for `paged_kernels.merge_attention`; returns float64."""
    lses = torch.stack((first_lse, second_lse)).double()
    weights = (lses - lses.logsumexp(dim=0)).exp().nan_to_num().unsqueeze(-1)
    return first.double() * weights[0] + second.double() * weights[1]

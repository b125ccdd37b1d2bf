"""Reference for the quantization of rows, with quotients in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.int8, *, group_size: int = -1
) -> tuple[Tensor, Tensor]:
    """Reference for `paged_kernels.quantize_rows.quantize_rows`, equal to the last bit.

    A quotient of float32 numbers is the same whether it is rounded at once or from float64.
    """
    rows, width = x.shape
    group = width if group_size == -1 else group_size
    groups = F.pad(x.double(), (0, -width % group)).view(rows, -1, group)
    scales = (groups.abs().amax(-1) / _LARGEST[dtype]).float()
    scales = torch.where(scales == 0, 1.0, scales)
    quotients = (groups / scales.double().unsqueeze(-1)).float()
    values = quotients.round() if dtype == torch.int8 else quotients
    values = values.clamp(-_LARGEST[dtype], _LARGEST[dtype]).to(dtype)
    return values.flatten(1)[:, :width], scales[:, 0] if group_size == -1 else scales

"""The dtypes that kernels read and write; kernels add in float32, or int8 products in int32."""

from __future__ import annotations

import torch

from paged_kernels.errors import check

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.int8)  # with scales


def check_float8(name: str, dtype: torch.dtype, arch: int) -> None:
    """Check that a device of compute capability `arch` has the `dtype` of the argument `name`.

    Raises:
        ArgumentError: the dtype is float8_e4m3fn and the device does not have it.
    """
    exists = dtype != torch.float8_e4m3fn or arch >= 89
    check(exists, name, f"in float8_e4m3fn needs compute capability 8.9, got {arch}")

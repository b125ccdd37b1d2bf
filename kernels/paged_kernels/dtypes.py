"""The types that kernels read and write; all of them compute in float32."""

from __future__ import annotations

import torch

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.int8)  # of a cache, with a scale for each head

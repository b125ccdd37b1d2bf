"""The dtypes that kernels read and write; every kernel computes in float32."""

from __future__ import annotations

import torch

MODEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.int8)  # of a KV cache, with one scale per head

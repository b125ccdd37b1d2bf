"""What all cases of the catalog are made of: tensors without memory, and the dtypes' names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ARCHS = (80, 90, 100)
PROMPT = 512  # tokens per sequence in a prefill

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FP8, INT8 = torch.float8_e4m3fn, torch.int8
NAMES = {BF16: "bf16", FP16: "fp16", FP32: "fp32", FP8: "fp8", INT8: "int8"}


@dataclass(frozen=True, slots=True)
class Case:
    """An operation in one configuration."""

    operation: str
    configuration: str
    call: Callable[[int], object]  # wrapper call for n tokens (or sequences, or blocks)
    archs: tuple[int, ...] = ARCHS

    @property
    def name(self) -> str:
        return f"{self.operation}, {self.configuration}"


def empty(*shape: int, dtype: torch.dtype) -> Tensor:
    """Return a tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    """Return int32 numbers without memory."""
    return empty(*shape, dtype=torch.int32)


def able(dtype: torch.dtype) -> tuple[int, ...]:
    """Return the architectures that have a dtype: the A100's tensor cores have no float8."""
    return tuple(arch for arch in ARCHS if dtype != FP8 or arch >= 89)

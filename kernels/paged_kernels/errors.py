"""Bad calls are refused before a launch, by the name of the argument."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; kernels load so many at once


class ArgumentError(ValueError):
    """An argument that no kernel can take; the message begins with its name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name = name

    def __str__(self) -> str:
        return " ".join(map(str, self.args))


def check(condition: bool, name: str, problem: str) -> None:
    """Raise :class:`ArgumentError` unless the condition holds."""
    if not condition:
        raise ArgumentError(name, problem)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    like: Tensor,
    *,
    contiguous: bool = True,
) -> None:
    """Check a tensor's shape (`None` takes any size), dtype, device (that of `like`) and memory.

    Without `contiguous` only the last dimension must be dense. Every tensor starts at a multiple
    of 16 bytes, and so does every row of one that is not contiguous.

    Raises:
        ArgumentError: something differs.
    """
    if not isinstance(tensor, Tensor):
        raise ArgumentError(name, f"must be a tensor, got {type(tensor).__name__}")
    allowed = (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
    if tensor.dtype not in allowed:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise ArgumentError(name, f"must be {wanted}, got {str(tensor.dtype)[6:]}")
    fits = tensor.dim() == len(shape) and all(
        wanted is None or wanted == size for wanted, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ArgumentError(name, f"must have shape [{wanted}], got {list(tensor.shape)}")
    check(tensor.device == like.device, name, f"must be on {like.device}, got {tensor.device}")
    if contiguous:
        check(tensor.is_contiguous(), name, f"must be contiguous, got strides {tensor.stride()}")
    else:
        _check_rows(name, tensor)
    check(
        tensor.data_ptr() % ALIGNMENT == 0, name, f"must start at a multiple of {ALIGNMENT} bytes"
    )


def _check_rows(name: str, tensor: Tensor) -> None:
    dense = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    check(dense, name, f"must be dense along its last dimension, got strides {tensor.stride()}")
    for stride in tensor.stride()[:-1]:
        aligned = stride * tensor.element_size() % ALIGNMENT == 0
        check(aligned, name, f"must have strides of whole {ALIGNMENT} bytes, got {tensor.stride()}")

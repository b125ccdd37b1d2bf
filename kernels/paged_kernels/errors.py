"""Argument checks: reject invalid arguments by name, before a launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes; kernels load this many at once

_trusted = False


class ArgumentError(ValueError):
    """Error for an argument that a kernel cannot accept; the message begins with its name."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(name, problem)
        self.name = name

    def __str__(self) -> str:
        return " ".join(map(str, self.args))


@contextmanager
def trusted_tensors() -> Iterator[None]:
    """Skip `check_tensor` within the block, in all threads.

    It is for a caller that makes the same calls again and again with tensors that differ only in
    their number of rows. The checks take a third of the time that the host needs for a launch.
    """
    global _trusted
    before, _trusted = _trusted, True
    try:
        yield
    finally:
        _trusted = before


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
    """Check a tensor's shape (`None` allows any size), dtype, device (as `like`'s) and layout.

    Without `contiguous` only the last dimension must be dense. Every tensor must start at a
    multiple of 16 bytes, and without `contiguous` so must every row.

    Raises:
        ArgumentError: a check fails.
    """
    if _trusted:
        return
    # About twenty of these checks precede the launches of a layer: passing must be cheap.
    if not isinstance(tensor, Tensor):
        raise ArgumentError(name, f"must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype is not dtypes and tensor.dtype not in _several(dtypes):
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in _several(dtypes))
        raise ArgumentError(name, f"must be {wanted}, got {str(tensor.dtype)[6:]}")
    if not _fits(tensor.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ArgumentError(name, f"must have shape [{wanted}], got {list(tensor.shape)}")
    if tensor.device != like.device:
        raise ArgumentError(name, f"must be on {like.device}, got {tensor.device}")
    if contiguous and not tensor.is_contiguous():
        raise ArgumentError(name, f"must be contiguous, got strides {tensor.stride()}")
    if not contiguous:
        _check_rows(name, tensor)
    if tensor.data_ptr() % ALIGNMENT:
        raise ArgumentError(name, f"must start at a multiple of {ALIGNMENT} bytes")


def check_blocks(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: torch.dtype | Sequence[torch.dtype],
    like: Tensor,
) -> None:
    """Check a tensor of blocks, each of which is contiguous; see `check_tensor`.

    Blocks may have gaps between them, of a size that keeps each one at a multiple of 16 bytes.

    Raises:
        ArgumentError: a check fails.
    """
    if _trusted or tensor.is_contiguous():
        check_tensor(name, tensor, shape, dtypes, like)
        return
    check_tensor(name, tensor, shape, dtypes, like, contiguous=False)
    inner = tensor.stride()[1:] == torch.empty(tensor.shape[1:], device="meta").stride()
    if not inner or tensor.stride(0) < tensor[0].numel():
        raise ArgumentError(name, f"must have contiguous blocks, got strides {tensor.stride()}")


def _several(dtypes: torch.dtype | Sequence[torch.dtype]) -> Sequence[torch.dtype]:
    return (dtypes,) if isinstance(dtypes, torch.dtype) else dtypes


def _fits(sizes: Sequence[int], shape: Sequence[int | None]) -> bool:
    if len(sizes) != len(shape):
        return False
    for size, wanted in zip(sizes, shape, strict=True):
        if size != wanted and wanted is not None:
            return False
    return True


def _check_rows(name: str, tensor: Tensor) -> None:
    *strides, last = tensor.stride()
    if last != 1 and tensor.shape[-1] != 1:
        problem = f"must be dense along its last dimension, got strides {tensor.stride()}"
        raise ArgumentError(name, problem)
    size = tensor.element_size()
    for stride in strides:
        if stride * size % ALIGNMENT:
            problem = f"must have strides of whole {ALIGNMENT} bytes, got {tensor.stride()}"
            raise ArgumentError(name, problem)

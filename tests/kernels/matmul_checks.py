"""What the tests of products share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from effort import ALL
from paged_kernels.device import INTERPRETED
from paged_kernels.errors import ArgumentError
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

SHAPES = [(1, 1, 1), (3, 70, 100), (16, 130, 256), (17, 64, 1100), (64, 65, 40)]
"""Rows, N and K: alone, below, at and above the limits of tiles, and with several splits."""

MANY_ROWS = 260  # more than are split among programs
WIDE = (70, 1100)  # N and K of three splits
ROUNDING = {torch.float32: 1e-7, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-8 * 1.01}

# float32 sums, and the 14 bits in which Hopper's tensor cores add 128 products of FP8.
SUM_ERROR = 2e-6
FP8_SUM_ERROR = SUM_ERROR if INTERPRETED else 2**-12


def assert_product(
    out: Tensor, expected: Tensor, magnitude: Tensor, sum_error: float = SUM_ERROR
) -> None:
    """Compare with the reference; `magnitude` is the reference for absolute values."""
    error = (out.double() - expected).abs()
    allowed = ROUNDING[out.dtype] * expected.abs() + sum_error * magnitude + 1e-7
    assert bool((error <= allowed).all()), f"{(error / allowed).max():.3g} times what is allowed"


def assert_rows_are_independent(product: Callable[[int], Tensor]) -> None:
    """Compare the first rows of a product of many rows with products of few, to the last bit."""
    with ordered_dot():
        whole = product(MANY_ROWS)
        for rows in (1, 3, 16, 17, 64) if ALL else (1, 17, 64):
            assert torch.equal(product(rows), whole[:rows]), rows


def packed_call(
    rows: int, packed: Tensor, width: int, group_size: int, dtype: torch.dtype,
    device: torch.device, *, largest: int,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of a product with packed weights without zero points, of at most about `largest`.

    The results are about 1; scales of neighbors differ much.
    """
    groups = 1 if group_size == -1 else -(-width // group_size)
    scales = torch.exp(torch.randn(len(packed), groups)) / (largest * width**0.5)
    return {
        "x": between_nans(torch.randn(rows, width).to(device, dtype)),
        "packed": between_nans(packed.to(device)),
        "scales": scales.to(device, dtype),
        "group_size": group_size,
    }


def assert_packed_product(
    out: Tensor, reference: Callable[..., Tensor], call: Mapping[str, Any]
) -> None:
    """Compare a product with packed weights with the reference."""
    identity = torch.eye(call["x"].shape[1], device=out.device)
    weights = reference(**{**call, "x": identity, "bias": None})
    assert_product(out, reference(**call), call["x"].double().abs() @ weights.abs())


def assert_wrong_number_is_noticed(
    product: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    call: dict[str, Any],
    name: str,
    bit: int,
) -> None:
    """Change one scale, or a bit of one packed number, and expect that the comparison fails."""
    call["x"] = 1 + call["x"].abs()
    out = product(**call)
    assert_packed_product(out, reference, call)
    call[name] = call[name].clone()
    if name == "scales":
        call[name][1, 3] *= 1.5
    else:
        call[name][1, 0] ^= bit
    with pytest.raises(AssertionError):
        assert_packed_product(out, reference, call)


def assert_refused(
    product: Callable[..., Tensor],
    good: Mapping[str, Any],
    changes: Mapping[str, Sequence[Mapping[str, Any]]],
) -> None:
    """Expect that each change of the arguments is refused, with the name of the argument."""
    for name, bad in changes.items():
        for change in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                product(**{**good, **change})


def _floats(builder: InterpreterBuilder, tile: TensorHandle) -> np.ndarray:
    """The numbers of a tile of a floating-point type, in float32, which has them all."""
    is_float8 = tile.dtype.scalar.is_fp8()
    convert = builder.create_fp_to_fp if is_float8 else builder.cast_impl
    options = (None,) if is_float8 else ()
    return np.asarray(convert(tile, tl.float32, *options).data.view(np.float32))


@contextmanager
def ordered_dot() -> Iterator[None]:
    """Make the interpreter add the products of a tile in their order, whatever the tile's size.

    So do tensor cores; the order of the CPU's library depends on the size. Sums of integers are
    exact in any order.
    """
    original = InterpreterBuilder.create_dot

    def create_dot(
        self: Any, a: TensorHandle, b: TensorHandle, total: TensorHandle, *others: Any
    ) -> TensorHandle:
        if total.data.dtype != np.float32:
            return original(self, a, b, total, *others)
        rows, columns = (_floats(self, each) for each in (a, b))
        sums, product = total.data.copy(), np.empty_like(total.data)
        for k in range(rows.shape[1]):
            np.multiply(rows[:, k, None], columns[k], out=product)
            sums += product
        return TensorHandle(sums, total.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        if INTERPRETED:
            patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield


def between_nans(tensor: Tensor) -> Tensor:
    """Return a copy in memory that holds NaN, or -1 if there is none, before and after it."""
    pad = 1024
    memory = torch.zeros(tensor.numel() + 2 * pad, dtype=tensor.dtype, device=tensor.device)
    memory.view(torch.uint8).fill_(0x7F if tensor.dtype == torch.float8_e4m3fn else 0xFF)
    inside = memory[pad : pad + tensor.numel()].view(tensor.shape)
    inside.copy_(tensor)
    return inside

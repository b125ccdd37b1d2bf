from __future__ import annotations

from typing import Any

import pytest
import torch
from matmul_checks import SHAPES, SUM_ERROR, WIDE, assert_product, between_nans
from paged_kernels.dense_matmul import (
    MAX_ROWS,
    dense_matmul,
    dense_matmul_silu_and_mul,
    num_arrivals,
)
from paged_kernels.errors import ArgumentError
from paged_kernels.reference import dense_matmul as reference
from paged_kernels.tuning.products import matmul_splits
from torch import Tensor

DTYPES = [torch.bfloat16, torch.float16]
FEW = [shape for shape in SHAPES if shape[0] <= MAX_ROWS] + [(MAX_ROWS, *WIDE)]
GATED = [(1, 2, 1), (3, 70, 100), (16, 130, 256), (17, 64, 300), (64, 258, 40)]


def random_operands(
    rows: int, features: int, width: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Activations and weights whose products are about 1."""
    x, w = (
        between_nans((torch.randn(count, width) * width**-0.25).to(dtype).to(device))
        for count in (rows, features)
    )
    return x, w


def check(out: Tensor, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    sizes = x.abs(), w.abs(), None if bias is None else bias.abs()
    expected, magnitude = reference.dense_matmul(x, w, bias), reference.dense_matmul(*sizes)
    assert_product(out, expected, magnitude)


def check_gated(out: Tensor, x: Tensor, gate_up: Tensor) -> None:
    """Compare with float64: errors of gate and up count at most 1.1 times the other factor."""
    expected = reference.dense_matmul_silu_and_mul(x, gate_up)
    gate, up = reference.dense_matmul(x, gate_up).abs().chunk(2, dim=1)
    of_gate, of_up = reference.dense_matmul(x.abs(), gate_up.abs()).chunk(2, dim=1)
    assert_product(out, expected, 1.1 * (of_gate * up + of_up * gate), 2 * SUM_ERROR)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("index", "shape"), list(enumerate(FEW)))
def test_equals_the_reference(
    index: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x, w = random_operands(*shape, dtype, device)
    bias = torch.randn(shape[1], device=device) if index % 2 else None
    out = dense_matmul(x, w, bias)
    assert out.dtype == dtype and out.shape == shape[:2]
    check(out, x, w, bias)


def test_counters_are_zero_again(device: torch.device) -> None:
    x, w = random_operands(3, *WIDE, torch.bfloat16, device)
    arrivals = torch.zeros(num_arrivals(len(w)), dtype=torch.int32, device=device)
    for _ in range(2):
        check(dense_matmul(x, w, arrivals=arrivals), x, w)
        assert not arrivals.any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", GATED)
def test_gated_equals_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    x, gate_up = random_operands(*shape, dtype, device)
    out = dense_matmul_silu_and_mul(x, gate_up)
    assert out.dtype == dtype and out.shape == (shape[0], shape[1] // 2)
    check_gated(out, x, gate_up)


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_the_number_of_rows(gated: bool, device: torch.device) -> None:
    assert matmul_splits(*WIDE)[0] == 3
    x, w = random_operands(MAX_ROWS, *WIDE, torch.bfloat16, device)
    product = dense_matmul_silu_and_mul if gated else dense_matmul
    everything = product(x, w)
    for rows in (1, 16, 17):
        assert torch.equal(product(x[:rows], w), everything[:rows])


def test_wrong_weights_are_noticed(device: torch.device) -> None:
    x, w = random_operands(3, 6, 64, torch.float16, device)
    other = w.flip(0)
    with pytest.raises(AssertionError):
        check(dense_matmul(x, other), x, w)
    with pytest.raises(AssertionError):  # gate and up have changed places
        check_gated(dense_matmul_silu_and_mul(x, torch.cat((w[3:], w[:3]))), x, w)


def test_no_rows(device: torch.device) -> None:
    x, w = random_operands(0, 70, 64, torch.float16, device)
    assert dense_matmul(x, w).shape == (0, 70)
    assert dense_matmul_silu_and_mul(x, w).shape == (0, 35)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    x, w = random_operands(4, 6, 64, torch.bfloat16, device)
    empty = x[:, :0].contiguous(), w[:, :0].contiguous()
    many = torch.zeros(MAX_ROWS + 1, 64, dtype=x.dtype, device=device)
    calls: dict[str, list[tuple[Any, ...]]] = {
        "x": [(x[0], w), (x.float(), w.float()), empty, (x, w[:0]), (many, w)],
        "w": [(x, w[:, :32]), (x, w.half())],
        "bias": [(x, w, w[:, 0].float()[:2].contiguous()), (x, w, torch.zeros(6).double())],
    }
    for name, bad in calls.items():
        for arguments in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                dense_matmul(*arguments)
    for gate_up in (w[:5], w[:, :32], w.half()):
        with pytest.raises(ArgumentError, match="^gate_up "):
            dense_matmul_silu_and_mul(x, gate_up)
    wide = torch.zeros(2, 2048, dtype=x.dtype, device=device)
    with pytest.raises(ArgumentError, match="^arrivals "):
        dense_matmul(wide, wide, arrivals=torch.zeros(0, dtype=torch.int32, device=device))

from __future__ import annotations

from typing import Any

import pytest
import torch
from matmul_checks import (
    FP8_SUM_ERROR,
    MANY_ROWS,
    SHAPES,
    WIDE,
    assert_product,
    assert_rows_are_independent,
    between_nans,
    ordered_dot,
)
from paged_kernels import _matmul
from paged_kernels.block_scaled_matmul import block_scaled_matmul
from paged_kernels.errors import ArgumentError
from paged_kernels.quantize_rows import quantize_rows
from paged_kernels.reference import block_scaled_matmul as reference
from torch import Tensor

FP8 = torch.float8_e4m3fn
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_call(rows: int, features: int, width: int, device: torch.device) -> dict[str, Tensor]:
    """Arguments whose results are about 1; scales of neighbors differ much."""
    blocks = -(-width // 128)

    def scales(*shape: int) -> Tensor:
        return torch.exp(torch.randn(shape)).div(60 * width**0.25).to(device)

    return {
        "x": between_nans((60 * torch.randn(rows, width)).to(FP8).to(device)),
        "x_scales": scales(rows, blocks),
        "w": between_nans((60 * torch.randn(features, width)).to(FP8).to(device)),
        "w_scales": scales(-(-features // 128), blocks),
    }


def check(out: Tensor, call: dict[str, Tensor]) -> None:
    sizes = {name: tensor.double().abs() for name, tensor in call.items()}
    expected = reference.block_scaled_matmul(**call)
    assert_product(out, expected, reference.block_scaled_matmul(**sizes), FP8_SUM_ERROR)


@pytest.mark.parametrize(("index", "shape"), list(enumerate(SHAPES)))
def test_equals_the_reference(
    index: int, shape: tuple[int, int, int], device: torch.device
) -> None:
    call = random_call(*shape, device)
    out_dtype = OUT_DTYPES[index % 3]
    if index % 2:
        call["bias"] = torch.randn(shape[1]).to(device, out_dtype)
    out = block_scaled_matmul(**call, out_dtype=out_dtype)
    assert out.dtype == out_dtype and out.shape == shape[:2]
    check(out, call)


def test_many_rows_equal_the_reference(device: torch.device) -> None:
    call = random_call(MANY_ROWS, *WIDE, device)
    call["bias"] = torch.randn(WIDE[0], device=device)
    check(block_scaled_matmul(**call, out_dtype=torch.bfloat16), call)


def test_takes_rows_as_they_are_quantized(device: torch.device) -> None:
    call = random_call(3, 70, 300, device)
    x = torch.randn(3, 300, device=device)
    call["x"], call["x_scales"] = quantize_rows(x, FP8, group_size=128)
    out = block_scaled_matmul(**call, out_dtype=torch.float32)
    check(out, call)
    exact = reference.block_scaled_matmul(
        x, torch.ones(3, 3, device=device), call["w"], call["w_scales"]
    )
    assert (out - exact).norm() / exact.norm() < 0.04  # 3 bits of a fraction


def test_a_row_does_not_depend_on_the_number_of_rows(device: torch.device) -> None:
    call = random_call(MANY_ROWS, *WIDE, device)

    def product(rows: int) -> Tensor:
        part = {"x": call["x"][:rows], "x_scales": call["x_scales"][:rows]}
        return block_scaled_matmul(**call | part, out_dtype=torch.float32)

    assert_rows_are_independent(product)


def test_other_splits_would_be_noticed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of few and of many rows are only equal to the last bit if their splits are equal.

    Sums with a scale for each block are rounded everywhere. Those of FP8 with one scale for a row
    are not: Hopper's tensor cores return so few bits that a float32 holds every sum exactly.
    """
    call = random_call(3, *WIDE, device)
    with ordered_dot():
        out = block_scaled_matmul(**call, out_dtype=torch.float32)
        monkeypatch.setattr(_matmul, "matmul_splits", lambda *_: (1, 9 * 128))
        other = block_scaled_matmul(**call, out_dtype=torch.float32)
    assert not torch.equal(out, other)
    check(other, call)


@pytest.mark.parametrize("name", ["x_scales", "w_scales"])
def test_a_wrong_scale_is_noticed(name: str, device: torch.device) -> None:
    call = random_call(3, 130, 200, device)
    out = block_scaled_matmul(**call, out_dtype=torch.float32)
    check(out, call)
    call[name] = call[name].clone()
    call[name][1, 1] *= 1.02
    with pytest.raises(AssertionError):
        check(out, call)


def test_no_rows(device: torch.device) -> None:
    call = random_call(0, 70, 64, device)
    assert block_scaled_matmul(**call, out_dtype=torch.float16).shape == (0, 70)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    good: dict[str, Any] = random_call(4, 130, 200, device)
    changes: dict[str, list[dict[str, Any]]] = {
        "x": [{"x": good["x"][0]}, {"x": good["x"].to(torch.int8)}],
        "x_scales": [{"x_scales": good["x_scales"][:, :1]}, {"x_scales": good["x_scales"][:2]}],
        "w": [{"w": good["w"][:, :100]}, {"w": good["w"].float()}],
        "w_scales": [{"w_scales": good["w_scales"][:1]}, {"w_scales": good["w_scales"].half()}],
        "bias": [{"bias": good["w_scales"][0]}],
        "out_dtype": [{"out_dtype": FP8}],
    }
    for name, bad in changes.items():
        for change in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                block_scaled_matmul(**{"out_dtype": torch.bfloat16} | good | change)

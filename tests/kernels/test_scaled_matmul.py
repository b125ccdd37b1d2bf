from __future__ import annotations

from functools import partial
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
)
from paged_kernels.errors import ArgumentError
from paged_kernels.reference import scaled_matmul as reference
from paged_kernels.scaled_matmul import scaled_matmul
from paged_kernels.tuning.products import matmul_splits
from torch import Tensor

FP8 = torch.float8_e4m3fn
DTYPES = [torch.int8, FP8]
OUT_DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def random_call(
    rows: int, features: int, width: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Arguments whose results are about 1."""

    def values(count: int) -> Tensor:
        wide = torch.randn(count, width) * (40 if dtype == torch.int8 else 60)
        return between_nans(wide.clamp(-127, 127).to(dtype).to(device))

    def scales(count: int) -> Tensor:
        return (torch.rand(count) + 0.1).div(40 * width**0.25).to(device)

    return {
        "x": values(rows),
        "x_scales": scales(rows),
        "w": values(features),
        "w_scales": scales(features),
    }


def check(out: Tensor, call: dict[str, Tensor]) -> None:
    sizes = {name: tensor.double().abs() for name, tensor in call.items()}
    sum_error = FP8_SUM_ERROR if call["x"].dtype == FP8 else 2e-7
    expected, magnitude = reference.scaled_matmul(**call), reference.scaled_matmul(**sizes)
    assert_product(out, expected, magnitude, sum_error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("index", "shape"), list(enumerate(SHAPES)))
def test_equals_the_reference(
    index: int, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(*shape, dtype, device)
    out_dtype = OUT_DTYPES[index % 3]
    if index % 2:
        call["bias"] = torch.randn(shape[1]).to(device, out_dtype)
    out = scaled_matmul(**call, out_dtype=out_dtype)
    assert out.dtype == out_dtype and out.shape == shape[:2]
    check(out, call)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(MANY_ROWS, *WIDE), (1100, 130, 32)])  # one band of tiles, two
def test_many_rows_equal_the_reference(
    shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    call = random_call(*shape, dtype, device)
    call["bias"] = torch.randn(shape[1], device=device)
    check(scaled_matmul(**call, out_dtype=torch.bfloat16), call)


def test_sums_of_int8_are_exact(device: torch.device) -> None:
    call = random_call(3, *WIDE, torch.int8, device)
    call |= {name: torch.ones_like(call[name]) for name in ("x_scales", "w_scales")}
    exact = call["x"].long().cpu() @ call["w"].long().cpu().T
    out = scaled_matmul(**call, out_dtype=torch.float32)
    assert torch.equal(out.cpu(), exact.float())
    call["x"], call["w"] = (torch.full_like(call[name], -128) for name in ("x", "w"))
    assert bool((scaled_matmul(**call, out_dtype=torch.float32) == 128**2 * WIDE[1]).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_number_of_rows(
    dtype: torch.dtype, device: torch.device
) -> None:
    assert matmul_splits(*WIDE)[0] == 3
    call = random_call(MANY_ROWS, *WIDE, dtype, device)
    call["bias"] = torch.randn(WIDE[0], device=device)

    def product(rows: int) -> Tensor:
        part = {"x": call["x"][:rows], "x_scales": call["x_scales"][:rows]}
        return scaled_matmul(**call | part, out_dtype=torch.float32)

    assert_rows_are_independent(product)


@pytest.mark.parametrize("name", ["x_scales", "w_scales"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wrong_scale_is_noticed(name: str, dtype: torch.dtype, device: torch.device) -> None:
    call = random_call(3, 5, 64, dtype, device)
    out = scaled_matmul(**call, out_dtype=torch.float32)
    check(out, call)
    call[name] = call[name].clone()
    call[name][1] *= 1.01
    with pytest.raises(AssertionError):
        check(out, call)


def test_splits_depend_on_the_weights_and_cover_them() -> None:
    for features in (1, 64, 1000, 4096, 6144, 28672, 128256):
        for width in (1, 128, 512, 513, 4096, 14336):
            splits, size = matmul_splits(features, width)
            assert size % 128 == 0 and (splits == 1 or size >= 512)
            assert splits * size >= width > (splits - 1) * size
            assert splits <= 8
    assert matmul_splits(4096, 4096) == (4, 1024)


def test_no_rows(device: torch.device) -> None:
    call = random_call(0, 70, 64, torch.int8, device)
    assert scaled_matmul(**call, out_dtype=torch.float16).shape == (0, 70)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    good: dict[str, Any] = random_call(4, 6, 64, torch.int8, device)
    product = partial(scaled_matmul, out_dtype=torch.bfloat16)
    too_wide = {name: torch.zeros(1, 2**17, dtype=torch.int8, device=device) for name in "xw"}
    changes: dict[str, list[dict[str, Any]]] = {
        "x": [
            {"x": good["x"][0]},
            {"x": good["x"].float()},
            {"x": good["x"][:, :0].contiguous(), "w": good["w"][:, :0].contiguous()},
            too_wide,
        ],
        "x_scales": [{"x_scales": good["x_scales"][:2]}, {"x_scales": good["x_scales"].half()}],
        "w": [{"w": good["w"][:, :32]}, {"w": good["w"].to(FP8)}],
        "w_scales": [{"w_scales": good["w_scales"][:2]}],
        "bias": [{"bias": good["w_scales"][:2]}, {"bias": good["w_scales"].double()}],
        "out_dtype": [{"out_dtype": torch.int8}],
    }
    for name, bad in changes.items():
        for change in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                product(**good | change)

from __future__ import annotations

from typing import Any

import pytest
import torch
from matmul_checks import (
    MANY_ROWS,
    SHAPES,
    WIDE,
    assert_packed_product,
    assert_refused,
    assert_rows_are_independent,
    assert_wrong_number_is_noticed,
    packed_call,
)
from paged_kernels.packed_words import pack_words
from paged_kernels.reference import w8a16_matmul as reference
from paged_kernels.w8a16_matmul import w8a16_matmul
from torch import Tensor

BF16, FP16 = torch.bfloat16, torch.float16


def bytes_of(lines: int, count: int, *, float8: bool) -> Tensor:
    """Random rows of bytes."""
    numbers = torch.randint(0, 256, (lines, count), dtype=torch.uint8)
    if float8:
        numbers[numbers & 0x7F == 0x7F] = 0x7E  # instead of NaN
    return numbers


def random_call(
    rows: int, features: int, width: int, group_size: int, dtype: torch.dtype,
    device: torch.device, *, float8: bool = False, zero_points: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Arguments whose results are about 1; scales of neighbors differ much."""
    packed = pack_words(bytes_of(features, width, float8=float8), 8)
    call = packed_call(rows, packed, width, group_size, dtype, device, largest=128)
    call["float8"] = float8
    if zero_points:
        lines, groups = call["scales"].shape
        zero_points = bytes_of(lines, groups + -groups % 4, float8=False)
        call["zero_points"] = zero_points.view(torch.int32).to(device)
    return call


def check(out: Tensor, call: dict[str, Any]) -> None:
    assert_packed_product(out, reference.w8a16_matmul, call)


@pytest.mark.parametrize(
    ("group_size", "kind", "dtype"),
    [
        (32, "zero_points", FP16),
        (128, "float8", BF16),
        (64, "float8", FP16),
        (-1, "plain", FP16),
        (-1, "float8", BF16),
        (-1, "zero_points", BF16),
    ],
)
@pytest.mark.parametrize(("index", "shape"), list(enumerate(SHAPES)))
def test_equals_the_reference(
    index: int, shape: tuple[int, int, int], group_size: int, kind: str,
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    options = {} if kind == "plain" else {kind: True}
    call = random_call(*shape, group_size, dtype, device, **options)
    if index % 2:
        call["bias"] = torch.randn(shape[1]).to(device, dtype)
    out = w8a16_matmul(**call)
    assert out.dtype == dtype and out.shape == shape[:2]
    check(out, call)


@pytest.mark.parametrize(("group_size", "float8"), [(128, True), (-1, False)])
def test_a_row_does_not_depend_on_the_number_of_rows(
    group_size: int, float8: bool, device: torch.device
) -> None:
    call = random_call(MANY_ROWS, *WIDE, group_size, BF16, device, float8=float8)
    call["bias"] = torch.randn(WIDE[0], device=device)
    check(w8a16_matmul(**call), call)
    assert_rows_are_independent(lambda rows: w8a16_matmul(**call | {"x": call["x"][:rows]}))


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("dtype", [FP16, BF16])
def test_all_numbers_are_exact(float8: bool, dtype: torch.dtype, device: torch.device) -> None:
    """Those of float8_e4m3fn below its normal numbers, too."""
    numbers = torch.arange(256, dtype=torch.uint8)
    if float8:
        numbers = numbers[numbers & 0x7F != 0x7F]
        wanted = numbers.view(torch.float8_e4m3fn).double()
    else:
        wanted = numbers.double() - 128
    out = w8a16_matmul(
        torch.ones(1, 1, dtype=dtype, device=device),
        pack_words(numbers[:, None], 8).to(device),
        torch.ones(len(numbers), 1, device=device),
        group_size=-1,
        float8=float8,
    )
    assert torch.equal(out[0].double().cpu(), wanted)


@pytest.mark.parametrize("name", ["scales", "zero_points", "packed"])
def test_a_wrong_number_is_noticed(name: str, device: torch.device) -> None:
    call = random_call(3, 5, 100, 32, FP16, device, zero_points=True)
    assert_wrong_number_is_noticed(w8a16_matmul, reference.w8a16_matmul, call, name, bit=64)


def test_no_rows(device: torch.device) -> None:
    assert w8a16_matmul(**random_call(0, 70, 64, 32, BF16, device)).shape == (0, 70)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    good = random_call(4, 6, 64, 32, BF16, device, zero_points=True)
    changes: dict[str, list[dict[str, Any]]] = {
        "x": [{"x": good["x"][0]}, {"x": good["x"].float()}],
        "packed": [{"packed": good["packed"][:, :4]}, {"packed": good["packed"].long()}],
        "scales": [{"scales": good["scales"][:, :1]}, {"scales": good["scales"].double()}],
        "zero_points": [{"zero_points": good["zero_points"][:2]}, {"float8": True}],
        "group_size": [{"group_size": 16}, {"group_size": 0}],
        "bias": [{"bias": good["scales"][:2, 0]}],
    }
    assert_refused(w8a16_matmul, good, changes)

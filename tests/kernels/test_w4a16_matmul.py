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
from paged_kernels.int4 import unpack_int4
from paged_kernels.packed_words import num_words, pack_words, unpack_words
from paged_kernels.reference import w4a16_matmul as reference
from paged_kernels.w4a16_matmul import w4a16_matmul
from torch import Tensor

from paged_backend.quantization.bits import pack_int4

BF16, FP16 = torch.bfloat16, torch.float16


def random_call(
    rows: int, features: int, width: int, group_size: int, dtype: torch.dtype,
    device: torch.device, *, zero_points: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Arguments whose results are about 1; scales of neighbors differ much."""
    packed = pack_words(torch.randint(0, 16, (features, width)), 4)
    call = packed_call(rows, packed, width, group_size, dtype, device, largest=8)
    if zero_points:
        call["zero_points"] = pack_int4(torch.randint(0, 16, call["scales"].shape)).to(device)
    return call


def check(out: Tensor, call: dict[str, Any]) -> None:
    assert_packed_product(out, reference.w4a16_matmul, call)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("group_size", "zero_points", "dtype"),
    [(32, True, FP16), (64, False, BF16), (128, False, FP16), (128, True, BF16), (-1, True, BF16)],
)
@pytest.mark.parametrize(("index", "shape"), list(enumerate(SHAPES)))
def test_equals_the_reference(
    index: int, shape: tuple[int, int, int], group_size: int, zero_points: bool,
    dtype: torch.dtype, device: torch.device,
) -> None:  # fmt: skip
    call = random_call(*shape, group_size, dtype, device, zero_points=zero_points)
    if index % 2:
        call["bias"] = torch.randn(shape[1]).to(device, dtype)
    out = w4a16_matmul(**call)
    assert out.dtype == dtype and out.shape == shape[:2]
    check(out, call)


@pytest.mark.parametrize(("group_size", "zero_points"), [(128, False), (-1, True)])
def test_a_row_does_not_depend_on_the_number_of_rows(
    group_size: int, zero_points: bool, device: torch.device
) -> None:
    call = random_call(MANY_ROWS, *WIDE, group_size, BF16, device, zero_points=zero_points)
    call["bias"] = torch.randn(WIDE[0], device=device)
    check(w4a16_matmul(**call), call)
    assert_rows_are_independent(lambda rows: w4a16_matmul(**call | {"x": call["x"][:rows]}))


def test_scales_may_be_float32_and_no_weight_is_rounded(device: torch.device) -> None:
    call = random_call(1, 40, 32, 32, FP16, device)
    call["x"] = torch.zeros_like(call["x"])
    call["x"][0, 3] = 1
    call["scales"] = torch.full((40, 1), 1.00048828125, device=device)  # half a step of float16
    numbers = unpack_words(call["packed"], 4, 32)[:, 3].double() - 8
    exact = numbers * call["scales"][:, 0].double()
    assert torch.equal(w4a16_matmul(**call)[0].double(), exact.half().double())


@pytest.mark.parametrize("name", ["scales", "zero_points", "packed"])
def test_a_wrong_number_is_noticed(name: str, device: torch.device) -> None:
    call = random_call(3, 5, 100, 32, FP16, device, zero_points=True)
    assert_wrong_number_is_noticed(w4a16_matmul, reference.w4a16_matmul, call, name, bit=4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("width", [1, 32, 128, 200])
def test_numbers_are_packed_in_pairs(bits: int, width: int, device: torch.device) -> None:
    numbers = torch.randint(0, 2**bits, (3, width), dtype=torch.uint8, device=device)
    packed = pack_words(numbers, bits)
    assert packed.shape == (3, num_words(width, bits))
    assert torch.equal(unpack_words(packed, bits, width), numbers)
    assert unpack_words(packed[:0], bits, width).shape == (0, width)
    columns = torch.nn.functional.pad(numbers, (0, 128))
    for part in range(16 // bits):  # the first word of the first block
        pair = columns[:, 32 * part : 32 * part + 2].int() * (width > 32 * part)
        found = packed[:, 0] >> (bits * part)
        assert torch.equal(found & (2**bits - 1), pair[:, 0])
        assert torch.equal(found >> 16 & (2**bits - 1), pair[:, 1])


def test_packing_in_sequence_equals_compressed_tensors(device: torch.device) -> None:
    values = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 9]], device=device)
    packed = pack_int4(values)
    assert packed.dtype == torch.int32
    assert [word & 0xFFFFFFFF for word in packed[0].tolist()] == [0x87654321, 0x9]
    assert torch.equal(unpack_int4(packed, 9), values.to(torch.uint8))


def test_no_rows(device: torch.device) -> None:
    assert w4a16_matmul(**random_call(0, 70, 64, 32, BF16, device)).shape == (0, 70)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    good = random_call(4, 6, 64, 32, BF16, device, zero_points=True)
    changes: dict[str, list[dict[str, Any]]] = {
        "x": [{"x": good["x"][0]}, {"x": good["x"].float()}],
        "packed": [{"packed": good["packed"][:, :4]}, {"packed": good["packed"].long()}],
        "scales": [{"scales": good["scales"][:, :1]}, {"scales": good["scales"].double()}],
        "zero_points": [
            {"zero_points": good["zero_points"][:2]},
            {"zero_points": good["zero_points"].to(torch.uint8)},
        ],
        "group_size": [{"group_size": 16}, {"group_size": 0}],
        "bias": [{"bias": good["scales"][:2, 0]}],
    }
    assert_refused(w4a16_matmul, good, changes)

from __future__ import annotations

import pytest
import torch
from paged_kernels.errors import ArgumentError
from paged_kernels.quantize_rows import quantize_rows
from paged_kernels.reference import quantize_rows as reference

DTYPES = [torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "width", "group_size"),
    [(1, 1, -1), (3, 100, -1), (17, 257, -1), (2, 16390, -1)]  # wider than a program holds
    + [(3, 128, 128), (16, 300, 128), (5, 20, 128), (64, 96, 32)],
)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_equals_the_reference(
    rows: int, width: int, group_size: int, dtype: torch.dtype, kind: torch.dtype,
    device: torch.device,
) -> None:  # fmt: skip
    x = (torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]).to(device, kind)
    before = x.clone()
    values, scales = quantize_rows(x, dtype, group_size=group_size)
    expected, expected_scales = reference.quantize_rows(x, dtype, group_size=group_size)
    assert values.dtype == dtype and scales.is_contiguous()
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_number_of_each_group_uses_the_whole_range(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.randn(4, 256, device=device)
    values, scales = quantize_rows(x, dtype, group_size=128)
    groups = values.float().view(4, 2, 128)
    largest = 127 if dtype == torch.int8 else 448
    assert bool((groups.abs().amax(-1) == largest).all())
    error = (groups * scales[:, :, None] - x.view(4, 2, 128)).abs()
    step = scales[:, :, None] if dtype == torch.int8 else x.abs().view(4, 2, 128) / 8 + 1e-3
    assert bool((error <= 0.5001 * step).all())
    assert not bool((error <= 0.1 * step).all())  # and this would notice a wrong scale


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_the_smallest_numbers_have_a_scale(
    dtype: torch.dtype, device: torch.device
) -> None:
    x = torch.zeros(3, 50, device=device)
    x[1, 7], x[2, 7] = 1e-45, 2.0
    values, scales = quantize_rows(x, dtype)
    assert torch.equal(scales[:2], torch.ones(2, device=device))
    assert not bool(values[:2].float().any())
    assert values[2, 7].float() == (127 if dtype == torch.int8 else 448)


def test_ties_go_to_the_even_integer(device: torch.device) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], device=device)
    values, scales = quantize_rows(x)
    assert scales.item() == 1
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def test_no_rows(device: torch.device) -> None:
    values, scales = quantize_rows(torch.empty(0, 200, device=device), group_size=128)
    assert values.shape == (0, 200) and scales.shape == (0, 2)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    x = torch.zeros(4, 64, device=device)
    calls = {
        "x": [
            lambda: quantize_rows(x[0]),
            lambda: quantize_rows(x.double()),
            lambda: quantize_rows(x[:, :32]),
            lambda: quantize_rows(x[:, :0]),
        ],
        "dtype": [lambda: quantize_rows(x, torch.uint8)],
        "group_size": [lambda: quantize_rows(x, group_size=0)],
    }
    for name, bad in calls.items():
        for call in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                call()

from __future__ import annotations

import pytest
import torch
from paged_kernels.errors import ArgumentError
from paged_kernels.reference import rms_norm as reference
from paged_kernels.rms_norm import add_rms_norm, rms_norm

# Half of the last place, relative: the kernel rounds once.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-8 * 1.01}
EPS = 1e-5
WIDTHS = [1, 48, 64, 100, 101, 576, 4096, 16384, 16388, 40000]


def assert_normed(out: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCES[out.dtype], atol=1e-7)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norm_equals_the_reference(width: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, width).to(device, dtype) * torch.tensor([[1e-3], [1], [30]], device=device)
    x, before = x.to(dtype), x.to(dtype)
    weight = (1 + torch.randn(width)).to(device, dtype)
    out = rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    assert_normed(out, reference.rms_norm(x, weight, EPS))
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_in_float32_is_not_rounded(dtype: torch.dtype, device: torch.device) -> None:
    x, weight = torch.randn(3, 100).to(device, dtype), 1 + torch.randn(100).to(device)
    assert_normed(rms_norm(x, weight, EPS), reference.rms_norm(x, weight, EPS))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("width", WIDTHS)
def test_addition_and_norm_equal_the_reference(
    width: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, residual = torch.randn(2, 3, width).to(device, dtype)
    x, before = x.contiguous(), x.clone()
    residual = 4 * residual.clone()
    weight = (1 + torch.randn(width)).to(device, dtype)
    expected, summed = reference.add_rms_norm(x, residual, weight, EPS)
    out = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, summed)
    assert_normed(out, expected)
    assert torch.equal(x, before)


@pytest.mark.parametrize("width", [72, 16392])
def test_rows_may_be_strided_and_what_lies_between_stays(width: int, device: torch.device) -> None:
    x, residual, out = torch.full((3, 4, width + 24), float("nan"), device=device).half()
    x[:, :width], residual[:, :width] = torch.randn(2, 4, width).half()
    weight = torch.randn(width, device=device).half()
    expected, _ = reference.add_rms_norm(x[:, :width], residual[:, :width], weight, EPS)
    given = out[:, :width]
    assert add_rms_norm(x[:, :width], residual[:, :width], weight, EPS, given) is given
    assert_normed(given, expected)
    for memory in (residual, out):
        assert memory[:, width:].isnan().all()
        assert not memory[:, :width].isnan().any()


@pytest.mark.parametrize("width", [100, 16388])
def test_out_may_be_x(width: int, device: torch.device) -> None:
    x, residual = (torch.randn(2, width, device=device) for _ in range(2))
    weight = torch.randn(width, device=device)
    expected = reference.rms_norm(x, weight, EPS)
    assert rms_norm(x, weight, EPS, x) is x
    assert_normed(x, expected)
    expected, _ = reference.add_rms_norm(x, residual, weight, EPS)
    add_rms_norm(x, residual, weight, EPS, x)
    assert_normed(x, expected)


def test_zeros_give_zeros_and_large_float16_does_not_overflow(device: torch.device) -> None:
    x = torch.tensor([[0.0], [60000.0]], device=device).half().expand(2, 64).contiguous()
    out = rms_norm(x, torch.ones(64, device=device).half(), EPS)
    assert torch.equal(out, (x > 0).half())


def test_no_rows(device: torch.device) -> None:
    x = torch.empty(0, 64, device=device)
    assert add_rms_norm(x, x.clone(), torch.ones(64, device=device), EPS).shape == (0, 64)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    x, weight = torch.zeros(4, 64, device=device), torch.zeros(64, device=device)
    strided = torch.zeros(4, 65, device=device)[:, :64]
    calls = {
        "x": [
            lambda: rms_norm(x[0], weight, EPS),
            lambda: rms_norm(x.double(), weight, EPS),
            lambda: rms_norm(strided, weight, EPS),
            lambda: rms_norm(torch.zeros(64, 4, device=device).T, weight, EPS),
            lambda: add_rms_norm(x[0], x, weight, EPS),
        ],
        "weight": [
            lambda: rms_norm(x, weight[:32], EPS),
            lambda: rms_norm(x, weight.half(), EPS),
            lambda: rms_norm(x.half(), weight.bfloat16(), EPS),
            lambda: rms_norm(x, weight.to("meta"), EPS),
        ],
        "residual": [
            lambda: add_rms_norm(x, x[:2], weight, EPS),
            lambda: add_rms_norm(x, x.half(), weight, EPS),
            lambda: add_rms_norm(x, strided, weight, EPS),
        ],
        "out": [
            lambda: rms_norm(x, weight, EPS, x[:, :32]),
            lambda: rms_norm(x, weight, EPS, x.half()),
            lambda: rms_norm(x, weight, EPS, strided),
        ],
    }
    for name, bad in calls.items():
        for call in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                call()

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from paged_kernels.errors import ArgumentError
from paged_kernels.reference import silu_and_mul as reference
from paged_kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul

Function = Callable[..., torch.Tensor]
# Half of the last place, relative: the kernel rounds once.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 2**-11 * 1.01, torch.bfloat16: 2**-8 * 1.01}


FUNCTIONS = [silu_and_mul, gelu_tanh_and_mul]


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 100), (5, 101), (2, 1024), (3, 2500)])
def test_equals_the_reference(
    rows: int, width: int, dtype: torch.dtype, device: torch.device, function: Function
) -> None:
    gate_up = (3 * torch.randn(rows, 2 * width)).to(device, dtype)
    before = gate_up.clone()
    out = function(gate_up)
    assert out.dtype == dtype
    expected = getattr(reference, function.__name__)(gate_up)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCES[dtype], atol=1e-7)
    assert torch.equal(gate_up, before)


def test_writes_all_of_out_and_nothing_else(device: torch.device) -> None:
    memory = torch.full((5, 104), float("nan"), device=device)
    out = memory.view(-1)[104 : 104 + 3 * 101].view(3, 101)
    gate_up = torch.randn(3, 202, device=device)
    assert silu_and_mul(gate_up, out) is out
    assert not out.isnan().any()
    assert memory.isnan().sum() == memory.numel() - out.numel()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_large_gates_do_not_overflow(device: torch.device, function: Function) -> None:
    gates = torch.tensor([[-3e38, -1e4, -90.0, 0.0, 90.0, 1e4, 3e38]], device=device)
    out = function(torch.cat((gates, torch.ones_like(gates)), dim=1))
    torch.testing.assert_close(out, gates.clamp(min=0), rtol=0, atol=1e-30)


def test_no_rows(device: torch.device) -> None:
    assert silu_and_mul(torch.empty(0, 64, device=device)).shape == (0, 32)


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    gate_up = torch.zeros(4, 64, device=device)
    calls = {
        "gate_up": [
            lambda: silu_and_mul(gate_up[:, :63].contiguous()),
            lambda: silu_and_mul(gate_up[:, :32]),
            lambda: silu_and_mul(gate_up[0]),
            lambda: silu_and_mul(gate_up.long()),
        ],
        "out": [
            lambda: silu_and_mul(gate_up, torch.zeros(4, 64, device=device)),
            lambda: silu_and_mul(gate_up, torch.zeros(4, 32, device=device).half()),
            lambda: silu_and_mul(gate_up, torch.zeros(4, 64, device=device)[:, :32]),
            lambda: silu_and_mul(gate_up, torch.zeros(4, 32, device="meta")),
        ],
    }
    for name, bad in calls.items():
        for call in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                call()

"""Causal convolutions with states, compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matmul_checks import assert_refused, between_nans
from paged_kernels.causal_conv import causal_conv
from paged_kernels.reference import causal_conv as reference
from state_checks import LONG, StateCall, pool_of
from state_steps import RAGGED, Step
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)


def call_of(
    step: Step, channels: int, width: int, dtype: torch.dtype, device: torch.device, **given: Any
) -> StateCall:
    x = torch.randn(step.num_rows, channels + 8).to(device, dtype)[:, :channels]
    options = {"bias": between_nans(torch.randn(channels).to(device, dtype)), "silu": True, **given}
    weight = between_nans(torch.randn(channels, width).to(device, dtype))
    return StateCall(
        causal_conv,
        reference.causal_conv,
        per_row={"x": x},
        others={"weight": weight, **options},
        pool=pool_of(channels, width - 1, dtype=dtype, device=device),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("channels", "width"), [(40, 4), (304, 2), (24, 7)])
@pytest.mark.parametrize("step", [RAGGED, LONG])
def test_equals_the_reference(
    step: Step, channels: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    call_of(step, channels, width, dtype, device).confirm(step)


def test_without_bias_and_activation(device: torch.device) -> None:
    call_of(RAGGED, 40, 4, torch.float32, device, bias=None, silu=False).confirm(RAGGED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_steps_or_batches(dtype: torch.dtype, device: torch.device) -> None:
    call_of(LONG, 40, 4, dtype, device).confirm_cuts(LONG, [1, 2, 3, 17, 40])


def test_rows_of_no_sequence_are_zeros(device: torch.device) -> None:
    call_of(RAGGED, 40, 4, torch.bfloat16, device).confirm_padding(RAGGED)


def test_a_wrong_number_is_noticed(device: torch.device) -> None:
    call = call_of(RAGGED, 40, 4, torch.bfloat16, device)
    call.confirm_differences(RAGGED, ("x", "weight", "pool", "slots"))


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    call = call_of(RAGGED, 40, 4, torch.float32, device)
    good = call.arguments(RAGGED)
    x, weight, pool = (good[name] for name in ("x", "weight", "pool"))
    bad: dict[str, list[Tensor]] = {
        "x": [x[0], x.long(), x.T],
        "weight": [weight.half(), weight[:20], weight[:, :1].contiguous()],
        "bias": [good["bias"].half(), good["bias"][:32]],
        "pool": [pool.long(), pool[..., :2].contiguous(), pool[:, :32].contiguous()],
    }
    assert_refused(
        causal_conv, good, {name: [{name: value} for value in bad[name]] for name in bad}
    )
    call.confirm_bad_steps(RAGGED)

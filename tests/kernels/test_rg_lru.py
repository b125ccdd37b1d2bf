"""The real-gated linear recurrent unit, compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matmul_checks import assert_refused, between_nans
from paged_kernels.reference import rg_lru as reference
from paged_kernels.rg_lru import rg_lru
from state_checks import LONG, StateCall, pool_of
from state_steps import RAGGED, Step

DTYPES = (torch.float32, torch.bfloat16)


def call_of(
    step: Step, width: int, dtype: torch.dtype, device: torch.device, *, shift: float = 0.0
) -> StateCall:
    """Random arguments; `shift` is added to the parameter of the decays."""
    x, input_gate, recurrent_gate = (
        torch.randn(3, step.num_rows, width + 8).to(device, dtype)[:, :, :width].unbind()
    )
    return StateCall(
        rg_lru,
        reference.rg_lru,
        per_row={"x": x, "input_gate": input_gate, "recurrent_gate": recurrent_gate},
        others={"recurrent_param": between_nans((shift + torch.randn(width)).to(device))},
        pool=pool_of(width, device=device),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [40, 136])
@pytest.mark.parametrize("step", [RAGGED, LONG])
def test_equals_the_reference(
    step: Step, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    call_of(step, width, dtype, device).confirm(step)


@pytest.mark.parametrize("shift", [-12.0, -4.0, 4.0])
def test_weak_and_strong_decays(shift: float, device: torch.device) -> None:
    """1 - a^2 is computed well also where the decay a is almost 1."""
    call_of(RAGGED, 40, torch.float32, device, shift=shift).confirm(RAGGED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_steps_or_batches(dtype: torch.dtype, device: torch.device) -> None:
    call_of(LONG, 40, dtype, device).confirm_cuts(LONG, [1, 2, 17])


def test_rows_of_no_sequence_are_zeros(device: torch.device) -> None:
    call_of(RAGGED, 40, torch.bfloat16, device).confirm_padding(RAGGED)


def test_a_wrong_number_is_noticed(device: torch.device) -> None:
    call = call_of(RAGGED, 40, torch.bfloat16, device)
    call.confirm_differences(
        RAGGED, ("x", "input_gate", "recurrent_gate", "recurrent_param", "pool", "slots")
    )


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    call = call_of(RAGGED, 40, torch.bfloat16, device)
    good = call.arguments(RAGGED)
    x, pool, parameter = good["x"], good["pool"], good["recurrent_param"]
    bad: dict[str, list[Any]] = {
        "x": [x[0], x.long(), x.T],
        "input_gate": [x.float(), x[:4], x[:, :32]],
        "recurrent_gate": [x.float(), x[:4], x[:, :32]],
        "recurrent_param": [parameter.half(), parameter[:32]],
        "pool": [pool.long(), pool[:, :32].contiguous()],
    }
    changes: dict[str, Any] = {name: [{name: value} for value in bad[name]] for name in bad}
    assert_refused(rg_lru, good, changes)
    call.confirm_bad_steps(RAGGED)

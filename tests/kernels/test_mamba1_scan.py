"""The selective scan of Mamba, compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from matmul_checks import assert_refused, between_nans
from paged_kernels.mamba1_scan import mamba1_scan
from paged_kernels.reference import mamba1_scan as reference
from state_checks import LONG, StateCall, pool_of
from state_steps import RAGGED, Step

DTYPES = (torch.float32, torch.bfloat16)


def call_of(
    step: Step, inner: int, state_dim: int, dtype: torch.dtype, device: torch.device, **others: Any
) -> StateCall:
    rows = step.num_rows
    # As a layer computes them: neighbors in each row.
    b, c, _ = (
        torch.randn(rows, 4 * state_dim)
        .to(device, dtype)
        .split((state_dim, state_dim, 2 * state_dim), 1)
    )
    return StateCall(
        mamba1_scan,
        reference.mamba1_scan,
        per_row={
            "x": torch.randn(rows, inner + 8).to(device, dtype)[:, :inner],
            "dt": between_nans(torch.randn(rows, inner).to(device, dtype)),
            "b": b,
            "c": c,
        },
        others={
            "a": between_nans(-torch.rand(inner, state_dim).add(0.1).mul(8).to(device)),
            "d": between_nans(torch.randn(inner).to(device)),
            "dt_bias": between_nans(torch.randn(inner).sub(2).to(device, dtype)),
            **others,
        },
        pool=pool_of(inner, state_dim, device=device),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("inner", "state_dim"), [(40, 16), (72, 24)])
@pytest.mark.parametrize("step", [RAGGED, LONG])
def test_equals_the_reference(
    step: Step, inner: int, state_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    call_of(step, inner, state_dim, dtype, device).confirm(step)


def test_without_optional_terms(device: torch.device) -> None:
    call_of(RAGGED, 40, 16, torch.bfloat16, device, d=None, dt_bias=None).confirm(RAGGED)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_steps_or_batches(dtype: torch.dtype, device: torch.device) -> None:
    call_of(LONG, 40, 16, dtype, device).confirm_cuts(LONG, [1, 2, 17])


def test_rows_of_no_sequence_are_zeros(device: torch.device) -> None:
    call_of(RAGGED, 40, 16, torch.bfloat16, device).confirm_padding(RAGGED)


def test_a_wrong_number_is_noticed(device: torch.device) -> None:
    call = call_of(RAGGED, 40, 16, torch.bfloat16, device)
    call.confirm_differences(RAGGED, ("x", "dt", "a", "b", "c", "d", "dt_bias", "pool", "slots"))


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    call = call_of(RAGGED, 40, 16, torch.bfloat16, device)
    good = call.arguments(RAGGED)
    x, dt, a, b, pool = (good[name] for name in ("x", "dt", "a", "b", "pool"))
    bad: dict[str, list[Any]] = {
        "x": [x[0], x.long(), x.T],
        "dt": [dt.half(), dt[:4], dt[:, :32]],
        "a": [a.half(), a[:32]],
        "b": [b.float(), b[:4], b[:, :8]],
        "c": [b.float(), b[:4], b[:, :8]],
        "d": [good["d"].half(), good["d"][:32]],
        "dt_bias": [good["dt_bias"].half(), good["dt_bias"][:32]],
        "pool": [pool.long(), pool[..., :8].contiguous(), pool[:, :32].contiguous()],
    }
    changes: dict[str, Any] = {name: [{name: value} for value in bad[name]] for name in bad}
    assert_refused(mamba1_scan, good, changes)
    call.confirm_bad_steps(RAGGED)

"""The selective scan of Mamba-2, row by row and in chunks, compared with float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from matmul_checks import assert_refused, between_nans, ordered_dot
from paged_kernels.reference import selective_scan as reference
from paged_kernels.selective_scan import selective_scan
from state_checks import CHUNKED, CUT, LONG, StateCall, pool_of
from state_steps import RAGGED, Step
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(4, 2, 8, 16), (3, 1, 40, 24)]
"""Heads, groups, head_dim and state_dim."""


def call_of(
    step: Step,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    shift: float = -2.0,
    **others: Any,
) -> StateCall:
    """Random arguments; `shift` is added to the logarithms of small time steps."""
    heads, groups, head_dim, state_dim = sizes
    rows, inner, state = step.num_rows, heads * head_dim, groups * state_dim
    fused = torch.randn(rows, inner + 2 * state).to(device, dtype)
    x, b, c = fused.split((inner, state, state), dim=1)
    return StateCall(
        selective_scan,
        reference.selective_scan,
        per_row={
            "x": x.unflatten(1, (heads, head_dim)),
            "dt": torch.randn(rows, 16).to(device, dtype)[:, :heads],
            "b": b.unflatten(1, (groups, state_dim)),
            "c": c.unflatten(1, (groups, state_dim)),
        },
        others={
            "a": between_nans(-torch.rand(heads).add(0.1).mul(8).to(device)),
            "d": between_nans(torch.randn(heads).to(device, dtype)),
            "dt_bias": between_nans(shift + torch.randn(heads).to(device)),
            **others,
        },
        pool=pool_of(heads, head_dim, state_dim, device=device),
        chunked=True,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_few_rows_equal_the_reference(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    call = call_of(RAGGED, sizes, dtype, device)
    call.confirm(RAGGED, all_decodes=True)


@pytest.mark.parametrize("shift", [-9.0, 0.0, 30.0])
def test_short_and_long_time_steps(shift: float, device: torch.device) -> None:
    call_of(RAGGED, SIZES[0], torch.float32, device, shift=shift).confirm(RAGGED)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_chunks_equal_the_reference(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    call = call_of(CHUNKED, sizes, dtype, device, shift=-5.0)
    call.confirm(CHUNKED, before=[60, 0, 9, 0, 70])


@pytest.mark.parametrize("step", [RAGGED, CHUNKED])
def test_without_optional_terms_and_with_limits(step: Step, device: torch.device) -> None:
    given = {"d": None, "dt_bias": None, "dt_limits": (0.3, 0.9)}
    call_of(step, SIZES[0], torch.bfloat16, device, **given).confirm(step)


def test_many_rows_in_float32_one_by_one(device: torch.device) -> None:
    """Cuts within a chunk change no bit, either."""
    call = call_of(LONG, SIZES[0], torch.float32, device)
    call.confirm(LONG)
    call.confirm_cuts(LONG, [20])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_steps_of_few_rows(dtype: torch.dtype, device: torch.device) -> None:
    call_of(RAGGED, SIZES[0], dtype, device).confirm_cuts(RAGGED, [1, 5])


def test_no_bit_depends_on_cuts_between_chunks(device: torch.device) -> None:
    call = call_of(CHUNKED, SIZES[0], torch.bfloat16, device)
    with ordered_dot():
        call.confirm_cuts(CHUNKED, [64, 128])


def test_without_lengths_no_bit_depends_on_steps(device: torch.device) -> None:
    """All rows are computed one by one, also in 16 bits."""
    call = replace(call_of(LONG, SIZES[0], torch.bfloat16, device), chunked=False)
    call.confirm(LONG)
    call.confirm_cuts(LONG, [20])


def test_rows_of_no_sequence_are_zeros(device: torch.device) -> None:
    call_of(RAGGED, SIZES[0], torch.bfloat16, device).confirm_padding(RAGGED)


@pytest.mark.parametrize("step", [RAGGED, CUT])
def test_a_wrong_number_is_noticed(step: Step, device: torch.device) -> None:
    call = call_of(step, SIZES[0], torch.bfloat16, device)
    call.confirm_differences(step, ("x", "dt", "a", "b", "c", "d", "dt_bias", "pool", "slots"))


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    call = call_of(RAGGED, SIZES[0], torch.bfloat16, device)
    good = call.arguments(RAGGED)
    x, dt, b, c, pool = (good[name] for name in ("x", "dt", "b", "c", "pool"))
    bad: dict[str, list[Any]] = {
        "x": [x[0], x.long(), x.transpose(1, 2)],
        "dt": [dt.half(), dt[:, :3], dt[:4]],
        "a": [good["a"].half(), good["a"][:3]],
        "b": [b.float(), b[:4], b[:, :0], b[:, :1].expand(-1, 3, -1).contiguous()],
        "c": [c.float(), c[:, :1], c[..., :8]],
        "d": [good["d"].half(), good["d"][:3]],
        "dt_bias": [good["dt_bias"].half(), good["dt_bias"][:3]],
        "dt_limits": [(1.0, 0.0)],
        "pool": [pool.long(), pool[:, :2].contiguous(), pool.transpose(2, 3).contiguous()],
    }
    changes: dict[str, Any] = {name: [{name: value} for value in bad[name]] for name in bad}
    assert_refused(selective_scan, good, changes)
    call.confirm_bad_steps(RAGGED)


def test_time_steps_may_be_infinitely_long(device: torch.device) -> None:
    """Softplus is the identity there, and its exponential would overflow."""
    call = call_of(RAGGED, SIZES[0], torch.float32, device, dt_limits=(0.0, math.inf), d=None)
    dt: Tensor = call.per_row["dt"]
    dt[3] = 800.0
    call.confirm(RAGGED)

"""Linear attention with fixed decays, row by row and in chunks, compared with float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from matmul_checks import assert_refused, between_nans, ordered_dot
from paged_kernels.linear_attention import linear_attention
from paged_kernels.reference import linear_attention as reference
from state_checks import CHUNKED, CUT, LONG, StateCall, pool_of
from state_steps import RAGGED, Step

DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(3, 16, 16), (1, 24, 40)]
"""Heads, key_dim and value_dim."""


def call_of(
    step: Step, sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> StateCall:
    heads, key_dim, value_dim = sizes
    keys, values = heads * key_dim, heads * value_dim
    fused = torch.randn(step.num_rows, 2 * keys + values).to(device, dtype)
    q, k, v = fused.split((keys, keys, values), dim=1)
    return StateCall(
        linear_attention,
        reference.linear_attention,
        per_row={
            "q": q.unflatten(1, (heads, key_dim)),
            "k": k.unflatten(1, (heads, key_dim)),
            "v": v.unflatten(1, (heads, value_dim)),
        },
        others={"slopes": between_nans(torch.tensor([0.01, 0.3, 2.0][:heads]).to(device))},
        pool=pool_of(heads, key_dim, value_dim, device=device),
        chunked=True,
    )


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_few_rows_equal_the_reference(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    call_of(RAGGED, sizes, dtype, device).confirm(RAGGED, num_decodes=len(RAGGED.lengths))


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_chunks_equal_the_reference(
    sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    call_of(CHUNKED, sizes, dtype, device).confirm(CHUNKED, before=[60, 0, 9, 0, 70])


def test_many_rows_in_float32_one_by_one(device: torch.device) -> None:
    """Cuts within a chunk change no bit, either."""
    call = call_of(LONG, SIZES[0], torch.float32, device)
    call.confirm(LONG)
    call.confirm_cuts(LONG, [20])


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
    call.confirm_differences(step, ("q", "k", "v", "slopes", "pool", "slots"))


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    call = call_of(RAGGED, SIZES[0], torch.bfloat16, device)
    good = call.arguments(RAGGED)
    q, k, v, pool = (good[name] for name in ("q", "k", "v", "pool"))
    bad: dict[str, list[Any]] = {
        "q": [q[0], q.long(), q.transpose(1, 2)],
        "k": [k.float(), k[:, :1], k[..., :8]],
        "v": [v.float(), v[:, :2], v[:4]],
        "slopes": [good["slopes"].half(), good["slopes"][:2]],
        "pool": [pool.long(), pool[:, :2].contiguous(), pool[..., :8].contiguous()],
    }
    changes: dict[str, Any] = {name: [{name: value} for value in bad[name]] for name in bad}
    assert_refused(linear_attention, good, changes)
    call.confirm_bad_steps(RAGGED)

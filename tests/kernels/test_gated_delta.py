"""The gated delta rule, row by row and in chunks, compared with float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from matmul_checks import assert_refused, between_nans, ordered_dot
from paged_kernels.gated_delta import gated_delta
from paged_kernels.reference import gated_delta as reference
from state_checks import CHUNKED, CUT, LONG, StateCall, pool_of
from state_steps import RAGGED, Step
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16)
SIZES = [(2, 4, 16, 8), (1, 1, 24, 40), (2, 2, 64, 64)]
"""Key heads, value heads, key_dim and value_dim."""


def call_of(
    step: Step,
    sizes: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    *,
    of_channels: bool = False,
    strength: float = 1.0,
) -> StateCall:
    """Random arguments.

    Args:
        step: the sequences.
        sizes: as in `SIZES`.
        of_channels: whether each key channel has a decay.
        strength: multiplies the logarithms of decays, which are about -1.
    """
    key_heads, heads, key_dim, value_dim = sizes
    rows = step.num_rows
    keys, values = key_heads * key_dim, heads * value_dim
    # As a layer computes them: neighbors in each row.
    fused = torch.randn(rows, 2 * keys + values).to(device, dtype)
    q, k, v = fused.split((keys, keys, values), dim=1)
    decays = (rows, heads, key_dim) if of_channels else (rows, heads)
    return StateCall(
        gated_delta,
        reference.gated_delta,
        per_row={
            "q": q.unflatten(1, (key_heads, key_dim)),
            "k": k.unflatten(1, (key_heads, key_dim)),
            "v": v.unflatten(1, (heads, value_dim)),
            "g": between_nans(-strength * torch.randn(decays).exp().to(device)),
            "beta": between_nans(torch.rand(rows, heads).to(device, dtype)),
        },
        others={},
        pool=pool_of(heads, key_dim, value_dim, device=device),
        chunked=True,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("of_channels", [False, True])
@pytest.mark.parametrize("sizes", SIZES)
def test_few_rows_equal_the_reference(
    sizes: tuple[int, int, int, int], of_channels: bool, dtype: torch.dtype, device: torch.device
) -> None:
    call = call_of(RAGGED, sizes, dtype, device, of_channels=of_channels, strength=0.1)
    call.confirm(RAGGED, all_decodes=True)


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_chunks_equal_the_reference(
    sizes: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device
) -> None:
    call_of(CHUNKED, sizes, dtype, device, strength=0.05).confirm(CHUNKED, before=[60, 0, 9, 0, 70])


@pytest.mark.parametrize("strength", [0.0, 1.0, 30.0])
def test_weak_and_strong_decays(strength: float, device: torch.device) -> None:
    call_of(CHUNKED, SIZES[0], torch.bfloat16, device, strength=strength).confirm(CHUNKED)


def test_equal_keys_in_chunks(device: torch.device) -> None:
    """The terms of a series for the inverse would cancel."""
    call = call_of(CHUNKED, SIZES[0], torch.bfloat16, device, strength=0.0)
    k = call.per_row["k"][:1].expand_as(call.per_row["k"]).contiguous()
    beta = torch.ones_like(call.per_row["beta"])
    replace(call, per_row={**call.per_row, "k": k, "beta": beta}).confirm(CHUNKED)


@pytest.mark.parametrize(("of_channels", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_many_rows_one_by_one(of_channels: bool, dtype: torch.dtype, device: torch.device) -> None:
    """With decays of channels or in float32, cuts within a chunk change no bit, either."""
    call = call_of(LONG, SIZES[0], dtype, device, of_channels=of_channels)
    call.confirm(LONG)
    call.confirm_cuts(LONG, [20])


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_bit_depends_on_steps_of_few_rows(dtype: torch.dtype, device: torch.device) -> None:
    call = call_of(RAGGED, SIZES[0], dtype, device)
    call.confirm_cuts(RAGGED, [1, 2, 5])


def test_no_bit_depends_on_cuts_between_chunks(device: torch.device) -> None:
    call = call_of(CHUNKED, SIZES[0], torch.bfloat16, device)
    with ordered_dot():
        call.confirm_cuts(CHUNKED, [64, 128])


def test_rows_before_a_cut_of_a_chunk_keep_their_bits(device: torch.device) -> None:
    """A row depends on no later one, also within its chunk."""
    call = call_of(CHUNKED, SIZES[0], torch.bfloat16, device)
    step = Step([100], [0], [1])
    with ordered_dot():
        whole = call.rows(0, 100)
        found = whole.kernel(**whole.arguments(step))
        part = call.rows(0, 90)
        first = part.kernel(**part.arguments(Step([90], [0], [1])))
    assert torch.equal(first, found[:90])


def test_without_lengths_no_bit_depends_on_steps(device: torch.device) -> None:
    """All rows are computed one by one, also in 16 bits."""
    call = replace(call_of(LONG, SIZES[0], torch.bfloat16, device), chunked=False)
    call.confirm(LONG)
    call.confirm_cuts(LONG, [20])


def test_rows_of_no_sequence_are_zeros(device: torch.device) -> None:
    call_of(RAGGED, SIZES[0], torch.bfloat16, device).confirm_padding(RAGGED)


def test_a_wrong_number_is_noticed(device: torch.device) -> None:
    few = call_of(RAGGED, SIZES[0], torch.bfloat16, device, strength=0.1)
    many = call_of(CUT, SIZES[0], torch.bfloat16, device, strength=0.1)
    for call, step in ((few, RAGGED), (many, CUT)):
        call.confirm_differences(step, ("q", "k", "v", "g", "beta", "pool", "slots"))


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    call = call_of(RAGGED, SIZES[0], torch.bfloat16, device)
    good = call.arguments(RAGGED)
    q, k, v, g, pool = (good[name] for name in ("q", "k", "v", "g", "pool"))
    bad: dict[str, list[Tensor]] = {
        "q": [q[0], q.long(), q.transpose(1, 2)],
        "k": [k.float(), k[:, :1], k[..., :8], k[:4]],
        "v": [v.float(), v[:, :3], v[:4]],
        "g": [g.half(), g[:, :2], g[:4]],
        "beta": [good["beta"].half(), good["beta"][:4]],
        "pool": [pool.long(), pool[:, :2].contiguous(), pool.transpose(2, 3).contiguous()],
    }
    changes: dict[str, Any] = {name: [{name: value} for value in bad[name]] for name in bad}
    assert_refused(gated_delta, good, changes)
    call.confirm_bad_steps(RAGGED)

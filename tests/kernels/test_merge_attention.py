"""Merging two attention results against float64."""

from __future__ import annotations

import math

import pytest
import torch
from batches import Batch, assert_close
from paged_kernels.errors import ArgumentError
from paged_kernels.merge_attention import merge_attention
from paged_kernels.paged_decode import paged_decode
from paged_kernels.reference import merge_attention as reference


def parts(device, rows=5, heads=3, dim=80, dtype=torch.float32):
    values = [torch.randn(rows, heads, dim).to(dtype).to(device) for _ in range(2)]
    lses = [(torch.randn(rows, heads) * 20).to(device) for _ in range(2)]
    return values[0], lses[0], values[1], lses[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_weights_follow_from_the_log_sum_exps(device, dtype, dim):
    arguments = parts(device, rows=7, dim=dim, dtype=dtype)
    out = torch.full_like(arguments[0], torch.nan)
    assert merge_attention(*arguments, out=out) is out
    assert_close(out, reference.merge_attention(*arguments), dtype)


def test_a_side_without_keys_has_no_weight_and_two_give_zero(device):
    first, first_lse, second, second_lse = parts(device)
    first_lse[0] = second_lse[1] = first_lse[2] = second_lse[2] = -math.inf
    first[0] = second[1] = first[2] = second[2] = 0
    out = merge_attention(first, first_lse, second, second_lse)
    assert torch.equal(out[0], second[0])
    assert torch.equal(out[1], first[1])
    assert torch.all(out[2] == 0)
    assert_close(out, reference.merge_attention(first, first_lse, second, second_lse), out.dtype)


def test_the_keys_of_one_sequence_in_two_parts(device):
    batch = Batch([(1, 96), (1, 160)], device=device)
    params, cut = batch.params(), 64
    heads = torch.empty(2, 4, device=device), torch.empty(2, 4, device=device)
    tables = batch.block_table, batch.block_table[:, cut // 16 :].contiguous()
    lens = torch.full_like(batch.seq_lens, cut), batch.seq_lens - cut
    outs = [
        paged_decode(batch.q, batch.kv_cache, table, length, params, lse=lse)
        for table, length, lse in zip(tables, lens, heads, strict=True)
    ]
    merged = merge_attention(outs[0], heads[0], outs[1], heads[1], out=outs[0])
    assert_close(merged, batch.wanted(params)[0], batch.dtype)


@pytest.mark.parametrize(
    ("name", "place", "change"),
    [
        ("first", 0, lambda x: x[:, :, ::2]),
        ("first_lse", 1, lambda x: x[:-1]),
        ("second", 2, lambda x: x.half()),
        ("second_lse", 3, lambda x: x.double()),
        ("second", 2, lambda x: x.to("meta")),
    ],
)
def test_bad_calls_name_the_argument(device, name, place, change):
    arguments = list(parts(device))
    arguments[place] = change(arguments[place])
    with pytest.raises(ArgumentError, match=f"^{name} "):
        merge_attention(*arguments)


def test_a_bad_output_is_named(device):
    arguments = parts(device)
    with pytest.raises(ArgumentError, match="^out "):
        merge_attention(*arguments, out=arguments[0].transpose(0, 1).contiguous())

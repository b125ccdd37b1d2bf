"""Latent attention of decodes, chunks of prompts and both, and its writes, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from batches import assert_close
from paged_kernels.errors import ArgumentError
from paged_kernels.latent_attention import latent_attention, plan_latent
from paged_kernels.latent_rope_cache import latent_rope_cache
from paged_kernels.reference import latent_attention as reference
from torch import Tensor

DECODES = [(1, 300), (1, 1), (1, 16), (1, 129), (1, 64)]
MIXED = [(1, 130), (1, 7), (1, 64), (5, 17), (40, 40), (33, 130), (1, 40), (16, 32)]


class Rows:
    """Sequences of `(queries, rows)` over a paged cache; every unused slot holds NaN."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        device: torch.device,
        heads: int = 4,
        rank: int = 40,
        rotary: int = 8,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        counts = [-(-rows // block_size) for _, rows in lengths]
        ids, used = torch.randperm(sum(counts) + 3), 0
        table = torch.full((len(lengths), max(counts) + 2), 2**30, dtype=torch.int32)
        cache = torch.full((len(ids), block_size, rank + rotary), torch.nan)
        for seq, ((_, rows), count) in enumerate(zip(lengths, counts, strict=True)):
            table[seq, :count] = ids[used : used + count]
            used += count
            for row in range(rows):
                cache[table[seq, row // block_size], row % block_size] = torch.randn(rank + rotary)
        starts = torch.tensor([0] + [queries for queries, _ in lengths]).cumsum(0)
        self.arguments: dict[str, Tensor] = {
            "q": torch.randn(int(starts[-1]), heads, rank + rotary).to(dtype).to(device),
            "cache": cache.to(dtype).to(device),
            "block_table": table.to(device),
            "seq_lens": torch.tensor([rows for _, rows in lengths]).int().to(device),
            "query_start_loc": starts.int().to(device),
        }
        self.options: dict[str, Any] = {"rank": rank, "scale": (rank + rotary) ** -0.5}
        self.dtype = dtype

    def check(self, num_decodes: int = 0) -> None:
        got = latent_attention(**self.arguments, **self.options, num_decodes=num_decodes)
        assert got.dtype == self.dtype
        assert_close(got, reference.latent_attention(**self.arguments, **self.options), self.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_batch(device: torch.device, dtype: torch.dtype) -> None:
    Rows(MIXED, device, dtype=dtype).check(num_decodes=3)


@pytest.mark.parametrize("block_size", [8, 64])
def test_block_sizes(device: torch.device, block_size: int) -> None:
    Rows(MIXED[:6], device, block_size=block_size).check(num_decodes=3)


@pytest.mark.parametrize("heads", [1, 5, 16, 40])
def test_numbers_of_heads(device: torch.device, heads: int) -> None:
    Rows([(1, 70), (11, 30)], device, heads=heads).check(num_decodes=1)


@pytest.mark.parametrize(("rank", "rotary"), [(8, 8), (256, 32), (512, 64)])
def test_sizes_of_rows(device: torch.device, rank: int, rotary: int) -> None:
    lengths = [(1, 70), (3, 30)]
    Rows(lengths, device, rank=rank, rotary=rotary, dtype=torch.float16).check(num_decodes=1)


def test_decodes_in_splits_and_whole(device: torch.device) -> None:
    Rows(DECODES, device).check(num_decodes=len(DECODES))
    Rows([(1, 1 + 7 * i % 40) for i in range(9)] + [(1, 500)], device).check(num_decodes=10)


def test_only_prompts_and_a_short_one_after_a_long_prefix(device: torch.device) -> None:
    Rows([(1, 1), (20, 20), (3, 190)], device).check()


def test_a_padded_sequence_gets_zeros(device: torch.device) -> None:
    rows = Rows([(1, 30), (1, 20)], device)
    rows.arguments["seq_lens"][1] = 0
    got = latent_attention(**rows.arguments, **rows.options, num_decodes=2)
    assert not bool(got[1].any()) and bool(got[0].any())


def test_layers_share_a_plan(device: torch.device) -> None:
    rows = Rows(MIXED, device)
    names = "q", "cache", "seq_lens", "query_start_loc"
    planned = {name: rows.arguments[name] for name in names}
    plan = plan_latent(**planned, rank=rows.options["rank"], num_decodes=3)
    first, second = (
        latent_attention(**rows.arguments, **rows.options, num_decodes=3, plan=plan)
        for _ in range(2)
    )
    assert torch.equal(first, second)
    with pytest.raises(ArgumentError, match="^plan "):
        latent_attention(**rows.arguments, **rows.options, num_decodes=2, plan=plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "rank", "rotary"), [(3, 40, 8), (20, 128, 24)])
def test_write(
    device: torch.device, dtype: torch.dtype, heads: int, rank: int, rotary: int
) -> None:
    tokens, size = 7, rank + rotary
    q = torch.randn(tokens, heads, size, dtype=dtype, device=device)
    rows = torch.randn(tokens, size, dtype=dtype, device=device)
    positions = torch.tensor([3, 0, 9, 1, 2, 4, 8], dtype=torch.int32, device=device)
    angles = torch.rand(10, rotary // 2, device=device)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    cache = torch.full((4, 8, size), torch.nan, dtype=dtype, device=device)
    slots = torch.tensor([31, 2, 8, -1, 16, 0, 9], device=device)
    wanted_q = reference.latent_rope(q, positions, table)
    wanted = reference.latent_rope(rows, positions, table)
    before = rows.clone()
    latent_rope_cache(q, rows, positions, table, cache, slots)
    tolerance = {"rtol": 1e-6 if dtype == torch.float32 else 2**-8, "atol": 1e-6}
    torch.testing.assert_close(q.double(), wanted_q, **tolerance)
    written = slots >= 0
    flat = cache.flatten(0, 1)
    torch.testing.assert_close(flat[slots[written]].double(), wanted[written], **tolerance)
    assert torch.equal(rows, before)
    assert int(flat.isnan().all(1).sum()) == 32 - int(written.sum())


def test_bad_calls_name_the_argument(device: torch.device) -> None:
    rows = Rows([(1, 30), (4, 20)], device)
    good: dict[str, Any] = {**rows.arguments, **rows.options, "num_decodes": 1}
    changes: dict[str, list[Any]] = {
        "q": [good["q"][0], good["q"].double()],
        "cache": [good["cache"].half(), good["cache"][..., :40].contiguous()],
        "block_table": [good["block_table"][:1]],
        "seq_lens": [good["seq_lens"].long()],
        "query_start_loc": [good["query_start_loc"][:2]],
        "num_decodes": [3, -1],
        "rank": [0, 44, 520],
    }
    for name, bad in changes.items():
        for value in bad:
            with pytest.raises(ArgumentError, match=f"^{name} "):
                latent_attention(**good | {name: value})

"""Paged attention on AMX units, which are emulated where the CPU has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kv_specs import alike
from platforms.amx_emulation import amx_or_emulation
from platforms.test_attention import (
    GROUPS,
    RAGGED,
    Batch,
    dense,
    hide_what_is_out_of_sight,
)
from platforms.test_kv_formats import make_batch
from torch import Tensor

from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec
from paged_backend.models.linear import LinearSpec
from paged_backend.platforms.cpu.amx_attention import fits
from paged_backend.platforms.cpu.attention import CpuAttention
from paged_backend.platforms.cpu.bf16_linear import BFloat16Linear

BF16 = KVCacheFormat(torch.bfloat16)


@pytest.fixture(scope="module", autouse=True)
def amx() -> Iterator[None]:
    with amx_or_emulation():
        yield


def make_backend(batch: Batch) -> CpuAttention:
    return CpuAttention(batch.spec, batch.num_blocks, amx=True)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    """Queries and weights are rounded to bf16, which has 8 bits."""
    torch.testing.assert_close(got.double(), wanted, atol=2e-2, rtol=1e-2)
    assert (got.double() - wanted).square().mean().sqrt() < 1.5e-3


@pytest.mark.sampled
@pytest.mark.parametrize("window", [None, 20, 150])
@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_ragged_batch(block_size: int, window: int | None) -> None:
    batch = make_batch(BF16, heads=4, head_dim=32, block_size=block_size)
    assert_close(*batch.run(make_backend(batch), window=window))


@pytest.mark.sampled
@pytest.mark.parametrize("block_size", [16, 32, 256])
@pytest.mark.parametrize("window", [1, 40, 130])
def test_blocks_before_the_window_are_not_read(block_size: int, window: int) -> None:
    batch = make_batch(BF16, [(1, 660), (95, 700)], heads=4, head_dim=32, block_size=block_size)
    backend = make_backend(batch)
    batch.step(backend, [(0, 600), (0, 600)], window=window)
    hide_what_is_out_of_sight(batch, backend, 601 - window)
    got = batch.step(backend, [(600, 601), (600, 700)], window=window)
    layer = batch.layer(0, window)
    whole = [dense(qkv, layer, batch.as_stored) for qkv in batch.qkv]
    assert_close(got, torch.cat((whole[0][600:601], whole[1][600:])))


@pytest.mark.sampled
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128])
@pytest.mark.parametrize("heads", [2, 6, 28, 66])
def test_head_layouts(heads: int, head_dim: int) -> None:
    batch = make_batch(BF16, RAGGED[1:4], heads=heads, head_dim=head_dim)
    assert_close(*batch.run(make_backend(batch)))


def test_soft_cap_and_sinks() -> None:
    batch = make_batch(BF16)
    options: dict[str, Any] = {"softcap": 2.0, "sinks": torch.randn(6)}
    batch.options = options
    assert_close(*batch.run(make_backend(batch), window=150))


def test_a_result_is_rounded_for_a_reader_of_bf16() -> None:
    batch = make_batch(BF16)
    plain, _ = batch.run(make_backend(batch))
    sizes = LinearSpec(plain.shape[1], {"o_proj": 24})
    batch.options = {"reader": BFloat16Linear(sizes, on_amx=True)}
    rounded, _ = batch.run(make_backend(batch))
    assert rounded.dtype == torch.bfloat16
    assert torch.equal(rounded, plain.bfloat16())


def test_numbers_do_not_depend_on_batch_or_chunks() -> None:
    batch = make_batch(BF16, [(300, 300), (40, 40)])
    together = batch.step(make_backend(batch), [(0, 300), (0, 40)])[:300]
    alone = make_backend(batch)
    spans = [(0, 100), (100, 107), (107, 299), (299, 300)]
    batch.qkv, batch.tables = batch.qkv[:1], batch.tables[:1]
    assert torch.equal(torch.cat([batch.step(alone, [span]) for span in spans]), together)


def test_what_a_block_holds_after_the_last_token_does_not_count() -> None:
    batch = make_batch(BF16, [(1, 20)])
    backend = make_backend(batch)
    wanted = batch.step(backend, [(0, 18)])
    batch.qkv[0][18:] = torch.nan
    batch.step(backend, [(18, 20)])
    assert torch.equal(batch.step(backend, [(0, 18)]), wanted)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "wanted"),
    [(64, 16, True), (96, 64, True), (64, 8, False), (80, 16, False), (16, 16, False)],
)
def test_shapes_that_fit(head_dim: int, block_size: int, wanted: bool) -> None:
    spec = KVCacheSpec(GROUPS, alike(GROUPS, 2, head_dim), block_size, torch.bfloat16)
    assert fits(spec) == wanted

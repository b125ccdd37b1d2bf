"""Keys and values in 8 and 16 bits: what is stored, and attention over it in float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from kv_specs import alike
from platforms.test_attention import (
    GROUPS,
    NUM_LAYERS,
    RAGGED,
    Batch,
    Make,
    assert_close,
    make_backend,
    make_torch,
)
from torch import Tensor

from paged_backend.models.attention import AttentionLayer
from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec, KVScales, kv_cache_format
from paged_backend.platforms.cpu.attention import CpuAttention
from paged_backend.platforms.portable.kv_pool import quantize, token_head_scales
from paged_backend.values.errors import ConfigError

FP8 = torch.float8_e4m3fn
FORMATS = [
    KVCacheFormat(torch.bfloat16),
    KVCacheFormat(torch.int8, KVScales.TOKEN_HEAD),
    KVCacheFormat(FP8, KVScales.TOKEN_HEAD),
    KVCacheFormat(FP8, KVScales.STATIC),
]
STATIC = {"k_scale": torch.tensor([0.02, 0.5]), "v_scale": torch.tensor([0.01, 0.004])}


@pytest.fixture(params=[CpuAttention, make_torch], ids=["cpu", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def as_stored(x: Tensor, stored: KVCacheFormat, static: Tensor | None = None) -> Tensor:
    """Return the numbers that `x` [tokens, heads, dim] becomes in a format, in float64."""
    if stored.scales is KVScales.NONE:
        return x.to(stored.dtype).double()
    scale = token_head_scales(x, stored.dtype) if static is None else static.expand(x.shape[:2])
    return quantize(x, scale, stored.dtype).double() * scale.double().unsqueeze(-1)


def make_batch(
    stored: KVCacheFormat,
    lengths: list[tuple[int, int]] = RAGGED,
    *,
    heads: int = 6,
    head_dim: int = 32,
    block_size: int = 16,
) -> Batch:
    """A batch without rotation, so that the stored numbers follow from the input alone."""
    torch.manual_seed(0)
    sizes = alike(GROUPS, 2, head_dim)
    spec = KVCacheSpec(GROUPS, sizes, block_size, stored.dtype, stored.scales)
    batch = Batch(lengths, spec, heads)
    longest = max(total for _, total in lengths)
    batch.rotary = torch.cat(
        (torch.ones(longest, head_dim // 2), torch.zeros(longest, head_dim // 2)), 1
    )
    batch.as_stored = partial(as_stored, stored=stored)
    if stored.scales is KVScales.STATIC:
        batch.options = STATIC | {"v_scale": STATIC["k_scale"]}
        batch.as_stored = partial(as_stored, stored=stored, static=STATIC["k_scale"])
    return batch


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stored", FORMATS, ids=str)
@pytest.mark.parametrize("block_size", [8, 16, 256])
def test_attention_over_the_stored_numbers(
    make: Make, stored: KVCacheFormat, block_size: int
) -> None:
    batch = make_batch(stored, block_size=block_size)
    assert_close(*batch.run(make_backend(make, batch)))
    assert_close(*batch.run(make_backend(make, batch), window=20))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stored", FORMATS, ids=str)
@pytest.mark.parametrize(("heads", "head_dim"), [(2, 8), (6, 80), (28, 128)])
def test_head_layouts(make: Make, stored: KVCacheFormat, heads: int, head_dim: int) -> None:
    batch = make_batch(stored, RAGGED[1:5], heads=heads, head_dim=head_dim)
    assert_close(*batch.run(make_backend(make, batch)))


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_soft_cap_and_sinks(make: Make, stored: KVCacheFormat) -> None:
    batch = make_batch(stored)
    batch.options = batch.options | {"softcap": 2.0, "sinks": torch.randn(6)}
    assert_close(*batch.run(make_backend(make, batch), window=150))


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_each_number_is_rounded_to_the_nearest_one(make: Make, stored: KVCacheFormat) -> None:
    """A token that sees only itself returns its value as it is stored."""
    batch = make_batch(stored, [(1, 1)] * 300, heads=2, head_dim=64)
    values = torch.randn(300, 2, 64) * 10.0 ** torch.randint(-3, 3, (300, 2, 1))
    values[0] = 0
    values[1, :, :4] = torch.tensor([448.0, 464.0, -500.0, 1e-9])  # limit of float8, and beyond it
    values[2] = torch.arange(-64, 64).view(2, 64) / 2  # ties
    values[2, :, 0] = 127
    values[3] = torch.arange(128).view(2, 64) / 1024  # numbers of float8 below the normal ones
    values[3, :, 0] = 448
    batch.qkv = [torch.cat((torch.zeros(1, 256), row.view(1, -1)), 1) for row in values]
    got = batch.step(make_backend(make, batch), [(0, 1)] * 300)
    static = batch.options.get("v_scale")
    wanted = as_stored(values, stored, static).float()
    assert torch.equal(got.view(300, 2, 64), wanted)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_numbers_do_not_depend_on_batch_or_chunks(stored: KVCacheFormat) -> None:
    batch = make_batch(stored, [(300, 300), (40, 40)])
    together = batch.step(make_backend(CpuAttention, batch), [(0, 300), (0, 40)])[:300]
    alone = make_backend(CpuAttention, batch)
    spans = [(0, 100), (100, 107), (107, 299), (299, 300)]
    batch.qkv, batch.tables = batch.qkv[:1], batch.tables[:1]
    assert torch.equal(torch.cat([batch.step(alone, [span]) for span in spans]), together)


@pytest.mark.parametrize("stored", FORMATS, ids=str)
def test_copied_blocks_keep_their_scales(make: Make, stored: KVCacheFormat) -> None:
    batch = make_batch(stored, [(1, 30)])
    backend = make_backend(make, batch)
    wanted = [batch.run(backend, layer)[0] for layer in range(NUM_LAYERS)]
    old = batch.tables[0].tolist()
    new = [block for block in range(1, batch.num_blocks) if block not in old][:2]
    backend.copy_blocks(list(zip(old, new, strict=True)))
    batch.tables = [torch.tensor(new, dtype=torch.int32)]
    for layer in range(NUM_LAYERS):
        assert torch.equal(batch.step(backend, [(29, 30)], layer), wanted[layer])


def test_numbers_that_are_not_finite_end_in_the_pool_without_an_error(make: Make) -> None:
    batch = make_batch(FORMATS[1], [(1, 20)])
    batch.qkv[0][3] = torch.nan
    batch.qkv[0][4] = torch.inf
    batch.run(make_backend(make, batch))


def make_layer(scale: float | None) -> AttentionLayer:
    static = None if scale is None else torch.full((2,), scale)
    return AttentionLayer(*(0, 4, 2, 16, 0.25), torch.ones(8, 16), k_scale=static, v_scale=static)


@pytest.mark.parametrize(
    ("option", "scales", "wanted"),
    [
        ("auto", [None, None], KVCacheFormat(torch.float32)),
        ("auto", [0.1, 0.1], KVCacheFormat(torch.float32)),
        ("bfloat16", [None, None], KVCacheFormat(torch.bfloat16)),
        ("int8_per_token_head", [0.1, 0.1], KVCacheFormat(torch.int8, KVScales.TOKEN_HEAD)),
        ("fp8", [None, None], KVCacheFormat(FP8, KVScales.TOKEN_HEAD)),
        ("fp8_e4m3", [0.1, 0.1], KVCacheFormat(FP8, KVScales.STATIC)),
        ("fp8_per_token_head", [0.1, 0.1], KVCacheFormat(FP8, KVScales.TOKEN_HEAD)),
    ],
)
def test_format_of_an_option(
    option: str, scales: list[float | None], wanted: KVCacheFormat
) -> None:
    supported = (torch.float32, torch.bfloat16, torch.int8, FP8)
    assert kv_cache_format(option, [make_layer(scale) for scale in scales], supported) == wanted


def test_scales_for_some_layers_only() -> None:
    with pytest.raises(ConfigError, match="no k_scale and v_scale for layer 1"):
        kv_cache_format("fp8", [make_layer(0.1), make_layer(None)], [torch.float32, FP8])


def test_what_a_platform_does_not_store() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype is bfloat16; .* stored as float16, int8"):
        kv_cache_format("bfloat16", [make_layer(None)], [torch.float16, torch.int8])


def test_capacity() -> None:
    spec = KVCacheSpec(GROUPS, alike(GROUPS, 4, 64), 16, torch.float32)
    int8 = replace(spec, dtype=torch.int8, scales=KVScales.TOKEN_HEAD)
    assert int8.bytes_per_block == 2 * NUM_LAYERS * 4 * (64 + 4) * 16
    assert spec.bytes_per_block / int8.bytes_per_block > 3.5


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_scales_before_the_window_are_not_read(dtype: torch.dtype) -> None:
    batch = make_batch(KVCacheFormat(dtype, KVScales.TOKEN_HEAD), [(1, 300)])
    backend = CpuAttention(batch.spec, batch.num_blocks)
    batch.step(backend, [(0, 299)], window=40)
    wanted = batch.step(backend, [(299, 300)], window=40)
    backend._scales.memory[:, [0, *batch.tables[0][: (299 - 39) // 16].tolist()]] = torch.nan
    assert torch.equal(batch.step(backend, [(299, 300)], window=40), wanted)

"""Both attention backends against dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from kv_specs import alike
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec
from paged_backend.platforms.cpu.attention import CpuAttention
from paged_backend.platforms.portable.attention import TorchAttention
from paged_backend.values.errors import ConfigError
from paged_backend.values.kv_cache_groups import KVCacheGroup
from paged_backend.values.windows import Chunks, Window, first_visible

NUM_LAYERS = 2
GROUPS = (KVCacheGroup(None, tuple(range(NUM_LAYERS))),)
# (queries in the step, keys in the cache after it)
RAGGED = [(1, 1), (1, 17), (5, 18), (33, 33), (16, 300), (1, 160)]

Make = Callable[[KVCacheSpec, int], AttentionBackend]


def make_torch(spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
    return TorchAttention(spec, num_blocks, torch.device("cpu"))


@pytest.fixture(params=[CpuAttention, make_torch], ids=["cpu", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def make_rotary(max_positions: int, head_dim: int) -> Tensor:
    frequencies = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(max_positions, dtype=torch.float64).outer(frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()


def rotate(x: Tensor, positions: Tensor, rotary: Tensor) -> Tensor:
    """The complex form of the rotation: first half real, second half imaginary."""
    half = x.shape[-1] // 2
    angles = rotary.double()[positions].unsqueeze(1)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(
        angles[..., :half], angles[..., half:]
    )
    return torch.cat((turned.real, turned.imag), dim=-1)


def dense(qkv: Tensor, layer: AttentionLayer, as_stored: Callable[[Tensor], Tensor]) -> Tensor:
    """All positions of one sequence, [length, heads * head_dim] in float64.

    `as_stored` returns the numbers that keys, or values, [length, kv_heads, head_dim] become in the
    cache.
    """
    length, kv_heads = len(qkv), layer.num_kv_heads
    rows = qkv.double().view(length, -1, layer.head_dim)
    q, k, v = torch.split(rows, [layer.num_heads, kv_heads, kv_heads], dim=1)
    positions = torch.arange(length)
    q, k = (rotate(x, positions, layer.cos_sin_cache) for x in (q, k))
    k, v = (as_stored(x).repeat_interleave(layer.num_heads // kv_heads, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    distance = positions[:, None] - positions
    hidden = distance < 0
    if isinstance(layer.window, Chunks):
        hidden |= positions[:, None] // layer.window.size != positions // layer.window.size
    elif layer.window is not None:
        hidden |= distance >= layer.window
    scores = scores.masked_fill(hidden, -math.inf)
    if layer.sinks is not None:
        sinks = layer.sinks.double()[:, None, None].expand(-1, length, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)


class Batch:
    """Sequences whose first keys are in the cache already, in scattered blocks."""

    def __init__(self, lengths: list[tuple[int, int]], spec: KVCacheSpec, heads: int) -> None:
        self.lengths = lengths
        self.spec = spec
        self.heads = heads
        width = (heads + 2 * spec.sizes[0].num_heads) * spec.sizes[0].key_dim
        self.qkv = [torch.randn(total, width) for _, total in lengths]
        per_seq = [-(-total // spec.block_size) for _, total in lengths]
        self.num_blocks = 2 * sum(per_seq) + 1
        ids = (torch.randperm(self.num_blocks - 1) + 1)[: sum(per_seq)].int()
        self.tables = list(torch.split(ids, per_seq))
        self.rotary = make_rotary(max(total for _, total in lengths), spec.sizes[0].key_dim)
        self.options: dict[str, Any] = {}  # options of the layers
        self.as_stored: Callable[[Tensor], Tensor] = lambda x: x

    def meta(self, spans: list[tuple[int, int]]) -> AttentionMetadata:
        """The step that computes positions `first` to `last` of each sequence."""
        size = self.spec.block_size
        table = torch.zeros(len(spans), max(map(len, self.tables)), dtype=torch.int32)
        slots = []
        for seq, (first, last) in enumerate(spans):
            table[seq, : len(self.tables[seq])] = self.tables[seq]
            positions = torch.arange(first, last)
            slots.append(self.tables[seq][positions // size].long() * size + positions % size)
        counts = torch.tensor([0] + [last - first for first, last in spans])
        positions = [torch.arange(first, last, dtype=torch.int32) for first, last in spans]
        lengths = [last - first for first, last in spans]
        longer = [seq for seq, length in enumerate(lengths) if length != 1]
        return AttentionMetadata(
            query_start_loc=counts.cumsum(0).int(),
            seq_lens=torch.tensor([last for _, last in spans], dtype=torch.int32),
            block_tables=(table,),
            slot_mappings=(torch.cat(slots),),
            positions=torch.cat(positions),
            num_decodes=longer[0] if longer else len(spans),
        )

    def step(
        self,
        backend: AttentionBackend,
        spans: list[tuple[int, int]],
        layer: int = 0,
        window: Window | None = None,
    ) -> Tensor:
        rows = torch.cat([x[a:b] for x, (a, b) in zip(self.qkv, spans, strict=True)])
        return backend.attend(self.layer(layer, window), rows.clone(), self.meta(spans))

    def layer(self, index: int, window: Window | None) -> AttentionLayer:
        kv_heads, head_dim, _ = self.spec.sizes[index]
        sizes = self.heads, kv_heads, head_dim, head_dim**-0.5
        return AttentionLayer(
            index, *sizes, cos_sin_cache=self.rotary, window=window, **self.options
        )

    def run(
        self, backend: AttentionBackend, layer: int = 0, window: Window | None = None
    ) -> tuple[Tensor, Tensor]:
        """What the backend computes in the last of two steps, and what is right."""
        cached = [(0, total - queries) for queries, total in self.lengths]
        last = [(total - queries, total) for queries, total in self.lengths]
        self.step(backend, cached, layer, window)
        got = self.step(backend, last, layer, window)
        wanted = [
            dense(x, self.layer(layer, window), self.as_stored)[first:]
            for x, (first, _) in zip(self.qkv, last, strict=True)
        ]
        return got, torch.cat(wanted)


def make_batch(
    lengths: list[tuple[int, int]], heads: int, kv_heads: int, head_dim: int, block_size: int
) -> Batch:
    torch.manual_seed(0)
    spec = KVCacheSpec(GROUPS, alike(GROUPS, kv_heads, head_dim), block_size, torch.float32)
    return Batch(lengths, spec, heads)


def make_backend(make: Make, batch: Batch) -> AttentionBackend:
    return make(batch.spec, batch.num_blocks)


def assert_close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got.double(), wanted, atol=2e-6, rtol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("window", [None, 1, 20, 150, Chunks(1), Chunks(20), Chunks(128)])
@pytest.mark.parametrize("block_size", [8, 16, 64, 256])
def test_ragged_batch_over_scattered_blocks(
    make: Make, block_size: int, window: Window | None
) -> None:
    batch = make_batch(RAGGED, heads=4, kv_heads=2, head_dim=32, block_size=block_size)
    assert_close(*batch.run(make_backend(make, batch), window=window))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 3), (9, 3), (8, 1), (28, 1)])
def test_head_layouts(make: Make, heads: int, kv_heads: int, head_dim: int) -> None:
    batch = make_batch(RAGGED[1:5], heads, kv_heads, head_dim, block_size=16)
    assert_close(*batch.run(make_backend(make, batch)))


@pytest.mark.parametrize("window", [None, 20, Chunks(20)])
@pytest.mark.parametrize(
    "options", [{"softcap": 0.7}, {"sinks": True}, {"softcap": 3.0, "sinks": True}]
)
def test_soft_cap_and_sinks(make: Make, options: dict[str, Any], window: Window | None) -> None:
    batch = make_batch(RAGGED, heads=4, kv_heads=2, head_dim=32, block_size=16)
    batch.options = options | ({"sinks": torch.randn(4)} if "sinks" in options else {})
    assert_close(*batch.run(make_backend(make, batch), window=window))


def test_layers_do_not_share_slots(make: Make) -> None:
    batch = make_batch([(3, 40)], heads=2, kv_heads=2, head_dim=16, block_size=16)
    backend = make_backend(make, batch)
    first, wanted = batch.run(backend, layer=0)
    batch.qkv = [x + 1 for x in batch.qkv]
    batch.run(backend, layer=1)
    assert_close(batch.step(backend, [(37, 40)], layer=1), batch.run(backend, layer=1)[1])
    batch.qkv = [x - 1 for x in batch.qkv]
    assert_close(batch.step(backend, [(39, 40)], layer=0), wanted[-1:])


def test_large_scores_do_not_overflow(make: Make) -> None:
    batch = make_batch([(4, 200)], heads=2, kv_heads=1, head_dim=32, block_size=16)
    batch.qkv = [x * torch.linspace(0, 30, len(x))[:, None] for x in batch.qkv]
    got, wanted = batch.run(make_backend(make, batch))
    torch.testing.assert_close(got.double(), wanted, atol=2e-3, rtol=2e-3)


def test_slot_minus_one_writes_nothing(make: Make) -> None:
    batch = make_batch([(1, 20)], heads=2, kv_heads=2, head_dim=16, block_size=16)
    backend = make_backend(make, batch)
    _, wanted = batch.run(backend)
    meta = batch.meta([(19, 20)])
    meta.slot_mappings[0].fill_(-1)
    layer = batch.layer(0, None)
    backend.attend(layer, torch.randn_like(batch.qkv[0][-1:]), meta)
    query_only = batch.qkv[0][-1:].clone()
    query_only[:, 32:] = torch.nan  # key and value must come from the cache
    assert_close(backend.attend(layer, query_only, meta), wanted)


def hide_what_is_out_of_sight(batch: Batch, backend: AttentionBackend, first: int) -> None:
    """Copy a block of NaN over the blocks before position `first`, and over the null block."""
    tables, qkv, size = batch.tables, batch.qkv, batch.spec.block_size
    spoiled = min(set(range(1, batch.num_blocks)) - set(torch.cat(tables).tolist()))
    batch.tables, batch.qkv = [torch.tensor([spoiled]).int()], [qkv[0][:size] * torch.nan]
    batch.step(backend, [(0, size)])
    batch.tables, batch.qkv = tables, qkv
    gone = [block for table in tables for block in table[: first // size].tolist()]
    backend.copy_blocks([(spoiled, block) for block in [0, *gone]])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("block_size", [8, 16, 32, 256])
@pytest.mark.parametrize("window", [1, 20, 130, 300, Chunks(20), Chunks(128), Chunks(300)])
def test_blocks_before_the_window_are_not_read(make: Make, block_size: int, window: Window) -> None:
    batch = make_batch([(1, 660), (1, 700)], 4, 2, 16, block_size)
    batch.options = {"softcap": 3.0} if window == 20 else {}
    backend = make_backend(make, batch)
    batch.step(backend, [(0, 600), (0, 600)], window=window)
    for spans in ([(600, 601), (600, 605)], [(601, 660), (605, 700)]):
        hide_what_is_out_of_sight(batch, backend, first_visible(spans[0][0], window))
        got = batch.step(backend, spans, window=window)
        layer = batch.layer(0, window)
        wanted = [
            dense(qkv, layer, batch.as_stored)[start:end]
            for qkv, (start, end) in zip(batch.qkv, spans, strict=True)
        ]
        assert_close(got, torch.cat(wanted))


def test_copied_blocks_serve_in_every_layer(make: Make) -> None:
    batch = make_batch([(1, 30)], heads=2, kv_heads=2, head_dim=16, block_size=16)
    backend = make_backend(make, batch)
    wanted = [batch.run(backend, layer)[1] for layer in range(NUM_LAYERS)]
    old = batch.tables[0].tolist()
    new = [block for block in range(1, batch.num_blocks) if block not in old][:2]
    backend.copy_blocks(list(zip(old, new, strict=True)))
    batch.tables = [torch.tensor(new, dtype=torch.int32)]
    for layer in range(NUM_LAYERS):
        assert_close(batch.step(backend, [(29, 30)], layer), wanted[layer])


def test_numbers_on_cpu_do_not_depend_on_batch_or_chunks() -> None:
    batch = make_batch([(300, 300), (40, 40)], heads=6, kv_heads=2, head_dim=32, block_size=16)
    backend = make_backend(CpuAttention, batch)
    together = batch.step(backend, [(0, 300), (0, 40)])[:300]
    alone = make_backend(CpuAttention, batch)
    spans = [(0, 100), (100, 107), (107, 299), (299, 300)]
    batch.qkv, batch.tables = batch.qkv[:1], batch.tables[:1]
    assert torch.equal(torch.cat([batch.step(alone, [span]) for span in spans]), together)


def test_metadata_of_another_dtype_or_with_gaps() -> None:
    good = make_batch([(1, 20)], 2, 2, head_dim=16, block_size=16).meta([(0, 20)])
    with pytest.raises(TypeError, match="seq_lens must be contiguous and torch.int32"):
        replace(good, seq_lens=good.seq_lens.long())
    with pytest.raises(TypeError, match="slot_mappings must be contiguous"):
        replace(good, slot_mappings=(good.slot_mappings[0][::2],))


def test_a_group_with_an_unused_place() -> None:
    layers = [
        AttentionLayer(index, 4, 4, 16, 1.0, make_rotary(4, 16), window=window)
        for index, window in enumerate([8, 8, None, 8, 8, None, 8, 8, 8, 8, 8])
    ]
    spec = KVCacheSpec.of(layers, 16, KVCacheFormat(torch.float32), 128)
    layers_of_groups = [(0, 1), (3, 4), (6, 7), (8, 9), (10,), (2, 5)]
    assert [group.layers for group in spec.groups] == layers_of_groups
    assert spec.places[4] == (1, 1)
    assert spec.places[5] == (5, 1)
    token_of_layer = 2 * 4 * 16 * 4
    assert spec.bytes_per_block == 2 * 16 * token_of_layer
    assert spec.bytes_per_token == 11 * token_of_layer


def test_bytes_of_a_block() -> None:
    group = KVCacheGroup(None, tuple(range(8)))
    spec = KVCacheSpec((group,), alike((group,), 4, 64), 16, torch.float32)
    assert spec.bytes_per_block == 2 * 8 * 4 * 64 * 16 * 4


def test_heads_that_the_cpus_kernels_cannot_read_are_refused() -> None:
    spec = KVCacheSpec(GROUPS, alike(GROUPS, 2, 12), 16, torch.float32)
    with pytest.raises(ConfigError, match="head_dim must be a multiple of 8 .*, got 12"):
        CpuAttention(spec, 4)

"""Backends of latent attention against dense attention in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from paged_backend.models.attention import (
    AttentionBackend,
    AttentionLayer,
    AttentionMetadata,
    LatentLayer,
)
from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec, kv_cache_format
from paged_backend.platforms.cpu import layers as cpu_layers
from paged_backend.platforms.cpu.latent import CpuLatentAttention
from paged_backend.platforms.portable import layers as torch_layers
from paged_backend.platforms.portable.latent import TorchLatentAttention
from paged_backend.values.errors import ConfigError

HEADS, RANK, ROTARY = 6, 40, 8  # a tile of rows ends within a query
# (queries in the last step, keys in the cache after it)
RAGGED = [(1, 1), (1, 17), (5, 18), (33, 33), (16, 300), (1, 160)]

Make = Callable[[KVCacheSpec, int], AttentionBackend]


def make_torch(spec: KVCacheSpec, num_blocks: int) -> AttentionBackend:
    return TorchLatentAttention(spec, num_blocks, torch.device("cpu"))


@pytest.fixture(params=[CpuLatentAttention, make_torch], ids=["cpu", "torch"])
def make(request: pytest.FixtureRequest) -> Make:
    made: Make = request.param
    return made


def make_layer(index: int, max_positions: int = 320) -> LatentLayer:
    positions = torch.arange(max_positions, dtype=torch.float64)
    angles = positions.outer(100.0 ** (-torch.arange(0, ROTARY, 2, dtype=torch.float64) / ROTARY))
    table = torch.cat((angles.cos(), angles.sin()), dim=1).float()
    return LatentLayer(index, HEADS, RANK, ROTARY, scale=0.2, cos_sin_cache=table)


def make_spec(dtype: torch.dtype = torch.float32, block_size: int = 16) -> KVCacheSpec:
    layers = [make_layer(index) for index in range(2)]
    return KVCacheSpec.of(layers, block_size, KVCacheFormat(dtype), 1024)


def rotate(x: Tensor, positions: Tensor, layer: LatentLayer) -> Tensor:
    """The complex form of the rotation of the last numbers of [length, heads, size] in float64."""
    x, half = x.double(), ROTARY // 2
    angles = layer.cos_sin_cache.double()[positions].unsqueeze(1)
    turned = torch.complex(x[..., RANK : RANK + half], x[..., RANK + half :]) * torch.complex(
        angles[..., :half], angles[..., half:]
    )
    return torch.cat((x[..., :RANK], turned.real, turned.imag), dim=-1)


def dense(q: Tensor, rows: Tensor, layer: LatentLayer, dtype: torch.dtype) -> Tensor:
    """All positions of one sequence, [length, heads, rank] in float64, with rows as stored."""
    positions = torch.arange(len(q))
    q = rotate(q, positions, layer)
    stored = rotate(rows.unsqueeze(1), positions, layer).squeeze(1).float().to(dtype).double()
    scores = torch.einsum("qhd,kd->hqk", q, stored) * layer.scale
    hidden = positions[:, None] < positions
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,kr->qhr", weights, stored[:, :RANK])


@dataclass
class Sequences:
    """Random queries and rows of some sequences, and their blocks."""

    q: list[Tensor]
    rows: list[Tensor]
    tables: list[Tensor]
    num_blocks: int
    block_size: int

    @classmethod
    def of(cls, lengths: list[int], block_size: int) -> Sequences:
        counts = [-(-length // block_size) for length in lengths]
        ids = (torch.randperm(2 * sum(counts)) + 1)[: sum(counts)].int()
        return cls(
            [torch.randn(length, HEADS, RANK + ROTARY) for length in lengths],
            [torch.randn(length, RANK + ROTARY) for length in lengths],
            list(torch.split(ids, counts)),
            2 * sum(counts) + 1,
            block_size,
        )

    def step(
        self, backend: AttentionBackend, layer: LatentLayer, spans: dict[int, tuple[int, int]]
    ) -> list[Tensor]:
        """Compute the positions of spans, by sequence; returns what each sequence gets."""
        size = self.block_size
        table = torch.zeros(len(spans), max(map(len, self.tables)), dtype=torch.int32)
        slots, positions = [], [torch.arange(*span) for span in spans.values()]
        for row, (seq, places) in enumerate(zip(spans, positions, strict=True)):
            table[row, : len(self.tables[seq])] = self.tables[seq]
            slots.append(self.tables[seq][places // size].long() * size + places % size)
        counts = [last - first for first, last in spans.values()]
        meta = AttentionMetadata(
            query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
            seq_lens=torch.tensor([last for _, last in spans.values()], dtype=torch.int32),
            block_tables=(table,),
            slot_mappings=(torch.cat(slots),),
            positions=torch.cat(positions).int(),
            num_decodes=next((i for i, count in enumerate(counts) if count != 1), len(counts)),
        )
        q = torch.cat([self.q[seq][slice(*span)] for seq, span in spans.items()])
        rows = torch.cat([self.rows[seq][slice(*span)] for seq, span in spans.items()])
        return list(torch.split(backend.attend_latent(layer, q, rows, meta), counts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_size", [16, 32])
def test_equals_dense_attention(make: Make, dtype: torch.dtype, block_size: int) -> None:
    torch.manual_seed(0)
    sequences = Sequences.of([total for _, total in RAGGED], block_size)
    backend = make(make_spec(dtype, block_size), sequences.num_blocks)
    for index in range(2):  # layers do not overwrite each other's rows
        layer = make_layer(index)
        cached = [total - queries for queries, total in RAGGED]
        sequences.step(backend, layer, {i: (0, n) for i, n in enumerate(cached) if n})
    for index in range(2):
        layer = make_layer(index)
        spans = {
            i: (n, total) for i, (n, (_, total)) in enumerate(zip(cached, RAGGED, strict=True))
        }
        found = sequences.step(backend, layer, spans)
        for seq, span in spans.items():
            wanted = dense(sequences.q[seq], sequences.rows[seq], layer, dtype)[slice(*span)]
            tolerance = 2e-5 if dtype == torch.float32 else 2e-3  # a tie may round the other way
            torch.testing.assert_close(found[seq].double(), wanted, rtol=tolerance, atol=tolerance)


def test_bits_depend_on_no_other_sequence_and_no_cut() -> None:
    torch.manual_seed(1)
    lengths = [150, 40, 7]
    sequences, layer = Sequences.of(lengths, 16), make_layer(0)
    together = CpuLatentAttention(make_spec(), sequences.num_blocks)
    whole = sequences.step(together, layer, {i: (0, n) for i, n in enumerate(lengths)})
    for seq, length in enumerate(lengths):
        alone = CpuLatentAttention(make_spec(), sequences.num_blocks)
        cuts = [0, *range(length - length % 11, length, 3), length] if seq else [0, 5, 149, 150]
        parts = [
            sequences.step(alone, layer, {seq: span})[0]
            for span in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        assert torch.equal(torch.cat(parts), whole[seq])


def test_a_copied_block_is_read_like_the_first_one(make: Make) -> None:
    torch.manual_seed(2)
    sequences, layer = Sequences.of([20], 16), make_layer(0)
    backend = make(make_spec(), sequences.num_blocks + 1)
    sequences.step(backend, layer, {0: (0, 19)})
    [wanted] = sequences.step(backend, layer, {0: (19, 20)})
    backend.copy_blocks([(int(sequences.tables[0][0]), sequences.num_blocks)])
    sequences.tables[0][0] = sequences.num_blocks
    [found] = sequences.step(backend, layer, {0: (19, 20)})
    assert torch.equal(found, wanted)


def test_a_token_keeps_one_row() -> None:
    spec = make_spec(torch.bfloat16)
    assert spec.bytes_per_token == 2 * (RANK + ROTARY) * 2
    assert spec.bytes_per_block == spec.bytes_per_token * 16


@pytest.mark.parametrize("option", ["fp8", "fp8_per_token_head", "int8_per_token_head"])
def test_rows_are_not_stored_in_8_bits(option: str) -> None:
    supported = torch.float32, torch.int8, torch.float8_e4m3fn
    message = f"^latent attention cannot have a KV cache in {option}; option kv_cache_dtype can be "
    with pytest.raises(ConfigError, match=message):
        kv_cache_format(option, [make_layer(0)], supported)


def test_a_backend_has_one_kind_of_layers(make: Make) -> None:
    backend, empty = make(make_spec(), 2), torch.empty(0)
    layer = AttentionLayer(0, 1, 1, 8, 1.0, empty)
    meta: Any = None
    with pytest.raises(TypeError, match="no keys and values"):
        backend.attend(layer, empty, meta)


@pytest.mark.parametrize("functions", [cpu_layers, torch_layers], ids=["cpu", "torch"])
@pytest.mark.parametrize(("inputs", "outputs"), [(24, 40), (40, 24), (7, 13), (130, 80)])
def test_products_of_heads(functions: Any, inputs: int, outputs: int) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(9, HEADS, inputs + 3)[..., 3:], torch.randn(HEADS, inputs, outputs)
    out = torch.full((9, HEADS, outputs + 5), math.nan)
    functions.multiply_heads(out[..., :outputs], x, weight)
    wanted = torch.einsum("rhi,hio->rho", x.double(), weight.double())
    torch.testing.assert_close(out[..., :outputs].double(), wanted, rtol=1e-5, atol=1e-4)
    assert bool(out[..., outputs:].isnan().all())
    if functions is cpu_layers:
        alone = torch.empty(1, HEADS, outputs)
        functions.multiply_heads(alone, x[4:5], weight)
        assert torch.equal(alone[0], out[4, :, :outputs])

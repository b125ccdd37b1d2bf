"""Layers that keep vectors of different sizes in one pool, and the same layers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionLayer, AttentionMetadata
from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec
from paged_backend.values.kv_cache_groups import KVCacheGroup

BLOCK, NUM_BLOCKS, WINDOW = 8, 24, 9
GROUPS = (KVCacheGroup(None, (0,)), KVCacheGroup(WINDOW, (1, 2)))
GROUP_OF = (0, 1, 1, 1)
Make = Callable[[KVCacheSpec, int], AttentionBackend]


def mixed_layers(device: torch.device) -> list[AttentionLayer]:
    """Two heads of 32, then one of 16 with a window; the last layer reads what layer 2 keeps."""
    generator = torch.Generator().manual_seed(1)
    large, small = (torch.rand(32, size, generator=generator).to(device) for size in (32, 16))
    first = AttentionLayer(0, 4, 2, 32, 0.3, large)
    second = AttentionLayer(1, 4, 1, 16, 0.4, small, window=WINDOW)
    others = replace(second, index=2), replace(second, index=3, shared_with=2)
    return [first, second, *others]


def mixed_spec(stored: KVCacheFormat) -> KVCacheSpec:
    """The spec of these layers."""
    sizes = {layer.index: layer.kept for layer in mixed_layers(torch.device("cpu"))[:3]}
    return KVCacheSpec(GROUPS, sizes, BLOCK, stored.dtype, stored.scales)


class Steps:
    """Two steps of two sequences: prompts, of which one is copied, then a decode and a chunk."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.layers = mixed_layers(device)
        generator = torch.Generator().manual_seed(2)
        # The tables of both groups hold neighbors, so that a wrong stride meets another's numbers.
        self._tables = torch.arange(1, 17, dtype=torch.int32).view(2, 4, 2).permute(2, 0, 1)
        self._spans = [[(0, 13), (0, 20)], [(13, 14), (20, 26)]]
        self._qkv = [
            [
                torch.randn(rows, 4 * layer.head_dim + layer.kept.numbers, generator=generator)
                for rows in (33, 7)
            ]
            for layer in self.layers
        ]

    def together(self, make: Make, stored: KVCacheFormat) -> list[Tensor]:
        """What each layer computes in both steps, of one pool."""
        backend = make(mixed_spec(stored), NUM_BLOCKS)
        answers = []
        for number in range(2):
            meta = self._meta(number, range(2))
            for layer in self.layers:
                qkv = self._rows(layer.index, number)
                if not layer.keeps_tokens:
                    qkv = qkv[:, : layer.num_heads * layer.head_dim].contiguous()
                answers.append(backend.attend(layer, qkv, meta))
            self._copy(backend)
        return answers

    def alone(self, make: Make, stored: KVCacheFormat) -> list[Tensor]:
        """The same with a pool for each layer; the last layer keeps what layer 2 keeps, too."""
        backends = []
        for layer in self.layers:
            group = KVCacheGroup(layer.window, (layer.index,))
            sizes = {layer.index: layer.kept}
            spec = KVCacheSpec((group,), sizes, BLOCK, stored.dtype, stored.scales)
            backends.append(make(spec, NUM_BLOCKS))
        answers = []
        for number in range(2):
            for layer, backend in zip(self.layers, backends, strict=True):
                meta = self._meta(number, [GROUP_OF[layer.index]])
                qkv = self._rows(layer.index, number)
                if not layer.keeps_tokens:
                    kept = layer.num_heads * layer.head_dim
                    qkv[:, kept:] = self._rows(2, number)[:, kept:]
                answers.append(backend.attend(replace(layer, shared_with=None), qkv, meta))
            for backend in backends:
                self._copy(backend)
        return answers

    def _copy(self, backend: AttentionBackend) -> None:
        """Move block 1 of the first group, and block 2 of the other one, to blocks of no table."""
        backend.copy_blocks([(1, 20), (2, 21)])
        self._tables = torch.where(self._tables == 1, 20, self._tables)
        self._tables = torch.where(self._tables == 2, 21, self._tables).int()

    def _rows(self, layer: int, number: int) -> Tensor:
        return self._qkv[layer][number].clone().to(self._device)

    def _meta(self, number: int, groups: range | list[int]) -> AttentionMetadata:
        spans = self._spans[number]
        slots = [
            torch.cat(
                [
                    self._tables[group, seq, torch.arange(*span) // BLOCK].long() * BLOCK
                    + torch.arange(*span) % BLOCK
                    for seq, span in enumerate(spans)
                ]
            )
            for group in groups
        ]
        counts = torch.tensor([0] + [last - first for first, last in spans])
        positions = torch.cat([torch.arange(*span, dtype=torch.int32) for span in spans])
        lengths = torch.tensor([last for _, last in spans], dtype=torch.int32)
        return AttentionMetadata(
            query_start_loc=counts.cumsum(0).int().to(self._device),
            seq_lens=lengths.to(self._device),
            block_tables=tuple(
                self._tables[group].contiguous().to(self._device) for group in groups
            ),
            slot_mappings=tuple(each.to(self._device) for each in slots),
            positions=positions.to(self._device),
            num_decodes=number,
        )

"""The indexes with which plain torch gathers what each sequence sees in a paged KV cache."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.models.attention import AttentionMetadata
from paged_backend.values.windows import Chunks, Window


@dataclass(frozen=True, slots=True)
class Call:
    """Sequences with the same number of queries, attended in one call."""

    rows: Tensor  # [seqs, queries] rows of the batch
    positions: Tensor  # [seqs, queries] their positions
    slots: Tensor  # [seqs, keys] slots of the keys that a query sees
    key_positions: Tensor  # [seqs, keys] their positions


@dataclass(frozen=True, slots=True)
class Plan:
    """The indexes that all layers with the same block table and window share in a step."""

    written: Tensor  # rows of the batch that have a slot
    slots: Tensor  # slots of these rows
    calls: list[Call]


class Plans:
    """The plans of a step, which layers of one group and window share.

    Args:
        block_size: tokens in a block.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._meta: AttentionMetadata | None = None
        self._plans: dict[tuple[int, Window | None], Plan] = {}

    def of(self, meta: AttentionMetadata, group: int, window: Window | None) -> Plan:
        """Return the plan of a group and a window for a step."""
        if self._meta is not meta:
            self._meta, self._plans = meta, {}
        if (group, window) not in self._plans:
            self._plans[group, window] = _make_plan(meta, group, window, self._block_size)
        return self._plans[group, window]


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate the two halves of each head of `x` [tokens, heads, head_dim] by its angles."""
    cos, sin = angles.unsqueeze(1).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)


def first_visible(positions: Tensor, window: Window) -> Tensor:
    """Return the first position that each of some tokens sees."""
    if isinstance(window, Chunks):
        return positions // window.size * window.size
    return (positions - window + 1).clamp_(min=0)


def _make_plan(meta: AttentionMetadata, group: int, window: Window | None, block_size: int) -> Plan:
    by_length: defaultdict[int, list[int]] = defaultdict(list)
    for seq, length in enumerate(meta.query_start_loc.diff().tolist()):
        by_length[length].append(seq)
    table = meta.block_tables[group]
    calls = [
        _make_call(meta, table, seqs, length, window, block_size)
        for length, seqs in by_length.items()
    ]
    slots = meta.slot_mappings[group]
    written = (slots >= 0).nonzero().squeeze(1)
    return Plan(written, slots[written], calls)


def _make_call(
    meta: AttentionMetadata,
    table: Tensor,
    seqs: list[int],
    length: int,
    window: Window | None,
    block_size: int,
) -> Call:
    index = torch.tensor(seqs, device=table.device)
    queries = torch.arange(length, device=table.device)
    seq_lens = meta.seq_lens[index].long().unsqueeze(1)
    rows = meta.query_start_loc[index].long().unsqueeze(1) + queries
    first = torch.zeros_like(seq_lens)
    if window is not None:  # blocks before the window of the first query may have other owners
        first = first_visible(seq_lens - length, window)
    keys = first + torch.arange(int((seq_lens - first).max()), device=table.device)
    real = torch.minimum(keys, seq_lens - 1)  # keys that the sequence has; others are not visible
    blocks = table[index].long().gather(1, real // block_size)
    slots = blocks * block_size + real % block_size
    return Call(rows, seq_lens - length + queries, slots, keys)

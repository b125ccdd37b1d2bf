"""The events of routers, with vLLM's names and fields.

A router computes its own keys from ``token_ids``, so the hashes can stay keyed with a secret. Like
vLLM's by default, the hashes of events are integers of 64 bits, the only form that Dynamo reads.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from paged_backend.core.cache_journal import BlockAdded, BlockEvicted, CacheChange
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.windows import Chunks, Window

MEDIUM = "GPU"  # vLLM's name of the memory that attention reads, also on a CPU
MAX_EVENT_BLOCKS = 256
_HASH_BYTES = 8  # the last ones of a digest


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks of one KV cache group can be found from now on, each the parent of the next."""

    block_hashes: list[int]
    parent_block_hash: int | None  # hash of the block before the first one
    token_ids: list[int]  # [len(block_hashes) * block_size]
    block_size: int
    lora_id: int | None  # number of the LoRA adapter that the blocks were computed with
    medium: str
    lora_name: str | None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks of one KV cache group can no longer be found."""

    block_hashes: list[int]
    medium: str
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """The cache is empty."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of one step; empty for a heartbeat."""

    ts: float  # seconds since 1970
    events: list[KVEvent]
    data_parallel_rank: int = 0


def events_of(changes: Iterable[CacheChange], layout: KVCacheLayout) -> list[KVEvent]:
    """Return the events for changes of the cache, up to ``MAX_EVENT_BLOCKS`` blocks in each."""
    events: list[KVEvent] = []
    for change in changes:
        last = events[-1] if events else None
        match change:
            case BlockAdded(block, group):
                if isinstance(last, BlockStored) and _continues(last, change):
                    last.block_hashes.append(short_hash(block.block_hash))
                    last.token_ids.extend(block.token_ids)
                else:
                    events.append(_stored(change, layout))
            case BlockEvicted(block_hash, group):
                if (
                    isinstance(last, BlockRemoved)
                    and last.group_idx == group
                    and len(last.block_hashes) < MAX_EVENT_BLOCKS
                ):
                    last.block_hashes.append(short_hash(block_hash))
                else:
                    events.append(BlockRemoved([short_hash(block_hash)], MEDIUM, group))
    return events


def short_hash(block_hash: bytes) -> int:
    """Return the hash of a block as events have it, an unsigned integer of 64 bits."""
    return int.from_bytes(block_hash[-_HASH_BYTES:], "big")


def _continues(last: BlockStored, change: BlockAdded) -> bool:
    parent = change.block.parent_hash
    return (
        last.group_idx == change.group
        and last.lora_id == _lora_id(change)
        and parent is not None
        and last.block_hashes[-1] == short_hash(parent)
        and len(last.block_hashes) < MAX_EVENT_BLOCKS
    )


def _lora_id(change: BlockAdded) -> int | None:
    return None if change.block.lora is None else change.block.lora.lora_int_id


def _stored(change: BlockAdded, layout: KVCacheLayout) -> BlockStored:
    window, parent = layout.windows[change.group], change.block.parent_hash
    return BlockStored(
        [short_hash(change.block.block_hash)],
        None if parent is None else short_hash(parent),
        list(change.block.token_ids),
        layout.block_size,
        _lora_id(change),
        MEDIUM,
        None if change.block.lora is None else change.block.lora.lora_name,
        change.group,
        _kind_of(window),
        None if isinstance(window, Chunks) else window,
    )


def _kind_of(window: Window | None) -> str:
    """Return vLLM's name for the attention of a group."""
    if window is None:
        return "full_attention"
    return "chunked_local_attention" if isinstance(window, Chunks) else "sliding_window"

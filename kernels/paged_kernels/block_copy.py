"""Copy whole blocks within a KV cache, between two caches, or to and from pinned host memory."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.device import INTERPRETED, device_of
from paged_kernels.errors import ALIGNMENT, check, check_tensor

_WORD = torch.int64  # a thread copies two at once
_TILE = 1024  # words; 8 KiB
_NUM_WARPS = 4
_PROGRAMS_PER_SM = 8
# About 100 KiB in flight fill a bus; more programs would occupy multiprocessors and wait.
_HOST_PROGRAMS = 32


@triton.jit(
    do_not_specialize=["num_pairs", "num_tiles", "source_blocks", "target_blocks", "num_programs"]
)
def _copy_blocks_kernel(
    source_ptr,
    target_ptr,
    source_ids_ptr,
    target_ids_ptr,
    num_pairs,
    num_tiles,  # total of all pairs and layers
    source_blocks,  # per layer
    target_blocks,
    num_programs,
    WORDS: tl.constexpr,  # per block
    TILE: tl.constexpr,
):
    """One program: every `num_programs`-th tile, ordered by layer, pair, and word of a block."""
    TILES: tl.constexpr = triton.cdiv(WORDS, TILE)
    for tile in range(tl.program_id(0), num_tiles, num_programs):
        pair = tile // TILES % num_pairs
        layer = (tile // TILES // num_pairs).to(tl.int64)
        source_id = tl.load(source_ids_ptr + pair)
        target_id = tl.load(target_ids_ptr + pair)
        words = tile % TILES * TILE + tl.arange(0, TILE)
        inside = (words < WORDS) & (source_id >= 0) & (target_id >= 0)
        source_word = (layer * source_blocks + source_id) * WORDS
        target_word = (layer * target_blocks + target_id) * WORDS
        copied = tl.load(source_ptr + source_word + words, mask=inside)
        tl.store(target_ptr + target_word + words, copied, mask=inside)


def copy_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Copy block `source_ids[i]` of `source` to block `target_ids[i]` of `target`, in every layer.

    Pairs are copied in no particular order: no block may be the target of two pairs or, if `source`
    is `target`, the target of one pair and the source of another. The caller must split such lists.

    One of the pools may be pinned host memory: the device reads and writes it in place, and the
    host may access it again once the stream has passed the copy.

    Args:
        source: [num_layers, num_blocks, ...] of any dtype.
        target: like `source` except for its number of blocks; may be `source`.
        source_ids: [pairs] int32 on the device. A negative id skips the pair.
        target_ids: [pairs] int32 on the device. A negative id skips the pair.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype or layout, lies where the device
            cannot reach it, or has blocks with a size that is not a multiple of 16 bytes.
    """
    check_tensor("source_ids", source_ids, (None,), torch.int32, like=source_ids)
    num_sms = device_of("source_ids", source_ids).num_sms
    num_pairs = len(source_ids)
    check_tensor("target_ids", target_ids, (num_pairs,), torch.int32, like=source_ids)
    check(source.dim() > 2, "source", f"must be [layers, blocks, ...], got {list(source.shape)}")
    check_tensor("source", source, source.shape, source.dtype, like=source)
    num_layers, _, *block = source.shape
    check_tensor("target", target, (num_layers, None, *block), source.dtype, like=target)
    for name, pool in (("source", source), ("target", target)):
        _check_reachable(name, pool, source_ids.device)
    size = math.prod(block) * source.element_size()
    check(
        size % ALIGNMENT == 0, "source", f"must have blocks of whole {ALIGNMENT} bytes, got {size}"
    )

    words = size // _WORD.itemsize
    num_tiles = num_layers * num_pairs * triton.cdiv(words, _TILE)
    on_device = source.device == target.device == source_ids.device
    limit = _PROGRAMS_PER_SM * num_sms if on_device else _HOST_PROGRAMS
    num_programs = min(num_tiles, limit)
    _copy_blocks_kernel[(num_programs,)](
        source.view(-1).view(_WORD),
        target.view(-1).view(_WORD),
        source_ids,
        target_ids,
        num_pairs,
        num_tiles,
        source.shape[1],
        target.shape[1],
        num_programs,
        WORDS=words,
        TILE=_TILE,
        num_warps=_NUM_WARPS,
    )


def _check_reachable(name: str, pool: Tensor, device: torch.device) -> None:
    mapped = pool.device.type == "cpu" and (INTERPRETED or pool.is_pinned())
    reachable = pool.device == device or mapped
    check(reachable, name, f"must be on {device} or in pinned memory, got {pool.device}")

"""Masks of allowed tokens, a bit for each, applied to logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from paged_kernels.device import device_of
from paged_kernels.errors import check_tensor

_TILE = 2048  # logits per program: one row keeps many multiprocessors busy
_NUM_WARPS = 4


@triton.jit
def _token_masks_kernel(
    logits_ptr, rows_ptr, masks_ptr, VOCAB: tl.constexpr, WORDS: tl.constexpr, TILE: tl.constexpr
):
    """One program: one tile of one row that has a mask."""
    TILES: tl.constexpr = triton.cdiv(VOCAB, TILE)
    mask = (tl.program_id(0) // TILES).to(tl.int64)
    row = tl.load(rows_ptr + mask).to(tl.int64)
    tokens = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    inside = tokens < VOCAB
    words = tl.load(masks_ptr + mask * WORDS + tokens // 32, mask=inside, other=-1)
    forbidden = ((words >> (tokens % 32)) & 1) == 0
    tl.store(logits_ptr + row * VOCAB + tokens, float("-inf"), mask=inside & forbidden)


def apply_token_masks(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the logits of forbidden tokens to minus infinity, in place.

    No logit is read. Rows without a mask, and bits of a mask beyond the vocabulary, have no effect.

    Args:
        logits: [any, vocab] float32.
        rows: [num_masks] int32, the row of each mask; the caller keeps them within `logits`.
        masks: [num_masks, ceil(vocab / 32)] int32. Bit t % 32 of word t // 32 is 1 if token t is
            allowed.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_tensor("logits", logits, (None, None), torch.float32, like=logits)
    device_of("logits", logits)
    vocab = logits.shape[1]
    check_tensor("rows", rows, (None,), torch.int32, like=logits)
    num_masks, num_words = rows.shape[0], triton.cdiv(vocab, 32)
    check_tensor("masks", masks, (num_masks, num_words), torch.int32, like=logits)
    if num_masks:
        _token_masks_kernel[(num_masks * triton.cdiv(vocab, _TILE),)](
            logits, rows, masks, VOCAB=vocab, WORDS=num_words, TILE=_TILE, num_warps=_NUM_WARPS
        )

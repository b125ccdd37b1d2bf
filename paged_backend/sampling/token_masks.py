"""Restricts samples to the tokens of a mask."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduler_output import TokenMasks


def mask_words(masks: TokenMasks) -> NDArray[np.int32]:
    """The words of masks as an array [num_masks, words per mask], without a copy."""
    return np.frombuffer(masks.bits, np.dtype("<i4")).reshape(len(masks.indices), -1)


def apply_token_masks(logits: Tensor, indices: Tensor, words: Tensor) -> None:
    """Set the logits of tokens that are not allowed to minus infinity, in place.

    Args:
        logits: [rows, vocab_size] float32.
        indices: the rows that have a mask, [num_masks] int64.
        words: the masks, [num_masks, words per mask] int32; a bit is 1 for an allowed token.
    """
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = ((words.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : logits.shape[1]]
    masked = logits.index_select(0, indices).masked_fill_(allowed == 0, -torch.inf)
    logits.index_copy_(0, indices, masked)

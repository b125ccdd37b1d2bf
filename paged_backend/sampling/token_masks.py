"""Restricts samples on the host to the tokens of their masks; a GPU has a kernel for it."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from paged_backend.core.scheduler_output import TokenMasks


def apply_token_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits of tokens that are not allowed to minus infinity, in place.

    Args:
        logits: [samples of the step, vocab_size] float32, on the host.
        masks: for some of the samples.
    """
    bits = np.frombuffer(masks.bits, np.uint8).reshape(len(masks.indices), -1)
    vocab_size = logits.shape[1]
    forbidden = np.unpackbits(~bits, axis=1, count=vocab_size, bitorder="little").view(np.bool_)
    rows = logits.numpy()
    for index, row in zip(masks.indices, forbidden, strict=True):
        np.putmask(rows[index], row, -np.inf)

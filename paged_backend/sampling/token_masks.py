"""Restricts samples on the host to the tokens of their masks; a GPU has a kernel for it."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from torch import Tensor

from paged_backend.core.scheduler_output import TokenMasks


def apply_token_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits of tokens that are not allowed to minus infinity, in place.

    Args:
        logits: [samples of the step, vocab_size] float32, on the host, contiguous.
        masks: for some of the samples.
    """
    rows = np.array(masks.indices, np.int64)
    words = np.frombuffer(masks.bits, "<u4").reshape(len(rows), -1)
    _kernel().apply_masks(logits.numpy(), rows, words)


def compile_token_masks() -> None:
    """Compile the function, so that the first constrained sample does not wait for it."""
    _kernel()


def _kernel() -> ModuleType:
    # Imported where a CPU serves: a host with a GPU needs no numba.
    from paged_backend.sampling import masking

    return masking

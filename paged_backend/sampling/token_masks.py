"""Restricts samples on the host to the tokens of their masks; a GPU has a kernel for it."""

from __future__ import annotations

from types import ModuleType

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduler_output import TokenMasks


def apply_token_masks(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits of tokens that are not allowed to minus infinity, in place.

    Args:
        logits: [samples of the step, vocab_size] float32, on the host, contiguous.
        masks: masks for some of the samples.
    """
    _kernel().apply_masks(logits.numpy(), *_arrays(masks))


def draw_greedy_allowed(logits: Tensor, masks: TokenMasks) -> list[int]:
    """Return what `draw_greedy` returns for the rows of masks after `apply_token_masks`.

    Args:
        logits: [samples of the step, vocab_size] float32, on the host, contiguous; not written.
        masks: masks for some of the samples.
    """
    rows, words = _arrays(masks)
    tokens = np.empty_like(rows)
    _kernel().argmax_allowed(logits.numpy(), rows, words, tokens)
    result: list[int] = tokens.tolist()
    return result


def compile_token_masks() -> None:
    """Compile the functions, so that the first constrained sample does not wait for it."""
    _kernel()


def _arrays(masks: TokenMasks) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """Return the row of each mask, and its words."""
    rows = np.array(masks.indices, np.int64)
    return rows, np.frombuffer(masks.bits, "<u4").reshape(len(rows), -1)


def _kernel() -> ModuleType:
    # Imported where a CPU serves: a host with a GPU needs no numba.
    from paged_backend.sampling import masking

    return masking

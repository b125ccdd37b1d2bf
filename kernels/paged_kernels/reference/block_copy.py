"""Reference for copies of whole blocks, pair by pair."""

from __future__ import annotations

from torch import Tensor


def copy_blocks(source: Tensor, target: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
    """Reference for `paged_kernels.block_copy.copy_blocks`."""
    for source_id, target_id in zip(source_ids.tolist(), target_ids.tolist(), strict=True):
        if source_id >= 0 and target_id >= 0:
            target[:, target_id] = source[:, source_id].to(target.device)

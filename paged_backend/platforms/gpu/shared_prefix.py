"""Finds the blocks that all decodes of a step begin with, for cascade attention.

Cascade attention reads the keys and values of these blocks once for all sequences. In return, it
attends twice and merges, and its launches depend on the batch, so no CUDA graph can hold them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paged_backend.core.scheduled_batch import ScheduledSequence
from paged_backend.values.windows import Window

MIN_SEQS = 8
"""With fewer, the reads that are saved take less time than the launches that are added."""

MIN_TOKENS = 256
"""The same is true of shorter prefixes. Both limits are estimates: no device has run this yet."""

MIN_SAVED_OF_GRAPH = 2**17
"""Tokens whose keys and values are not read again, for a step to give up its CUDA graph.

To launch the kernels of 32 layers one by one takes some milliseconds. An H200 reads 2**17 tokens of
Llama-3-8B, which are 17 GB, in 4 ms.
"""


def count_shared_blocks(
    decodes: Sequence[ScheduledSequence],
    block_size: int,
    graph: bool,
    windows: Sequence[Window | None] = (None,),
) -> int:
    """Return the number of blocks that decodes share, or 0 if cascade attention is not worth it.

    Args:
        decodes: sequences with one token each.
        block_size: tokens in a block.
        graph: whether a CUDA graph could replay the step without cascade attention.
        windows: the window of each KV cache group. Only blocks of groups without one are counted.
    """
    groups = [group for group, window in enumerate(windows) if window is None]
    if len(decodes) < MIN_SEQS or not groups:
        return 0
    # The block of a step's own token is not shared, even if it is full now.
    num_shared = min(item.start for item in decodes) // block_size
    least = -(-MIN_TOKENS // block_size)
    for group in groups:
        if num_shared < least:
            return 0
        num_shared = _count_in_group(decodes, num_shared, least, group, len(windows))
    saved = num_shared * block_size * (len(decodes) - 1) * len(groups) // len(windows)
    worth = num_shared >= least and (not graph or saved >= MIN_SAVED_OF_GRAPH)
    return num_shared if worth else 0


def _count_in_group(
    decodes: Sequence[ScheduledSequence], most: int, least: int, group: int, num_groups: int
) -> int:
    """Return the number of shared blocks in a group, up to `most`; 0 if they are below `least`."""
    first, place = decodes[0].block_ids, (least - 1) * num_groups + group
    if any(item.block_ids[place] != first[place] for item in decodes):
        return 0  # as in most steps, found without reading the tables
    shared = first[group : most * num_groups : num_groups]
    for item in decodes:
        ids = item.block_ids[group : len(shared) * num_groups : num_groups]
        if ids != shared:
            shared = shared[: int((np.array(ids) != np.array(shared)).argmax())]
    return len(shared)

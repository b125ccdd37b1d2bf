"""When the blocks that decodes share are read once for all of them."""

from __future__ import annotations

import pytest

from paged_backend.core.scheduled_batch import ScheduledSequence
from paged_backend.platforms.gpu.shared_prefix import count_shared_blocks

SIZE = 16


def decodes(count: int, shared: int, tokens: int | None = None) -> list[ScheduledSequence]:
    """Sequences with `shared` blocks in common and two of their own, at different lengths."""
    prefix = list(range(1, shared + 1))
    return [
        ScheduledSequence(
            seq,
            [7],
            shared * SIZE + seq % SIZE if tokens is None else tokens,
            [*prefix, 1000 + 2 * seq, 1001 + 2 * seq],
            (),
        )
        for seq in range(count)
    ]


@pytest.mark.parametrize(
    ("count", "shared", "found"), [(8, 16, 16), (8, 40, 40), (7, 40, 0), (100, 15, 0), (0, 0, 0)]
)
def test_enough_sequences_share_enough_tokens(count, shared, found):
    assert count_shared_blocks(decodes(count, shared), SIZE, graph=False) == found


def test_a_sequence_that_shares_less_decides():
    batch = decodes(9, 40)
    batch[5].block_ids[20] = 5000
    assert count_shared_blocks(batch, SIZE, graph=False) == 20
    batch[7].block_ids[3] = 5001
    assert count_shared_blocks(batch, SIZE, graph=False) == 0


def test_the_block_of_the_steps_own_token_is_not_shared():
    batch = decodes(8, 40, tokens=40 * SIZE - 1)
    assert count_shared_blocks(batch, SIZE, graph=False) == 39


def test_a_step_gives_up_its_graph_only_for_many_tokens():
    assert count_shared_blocks(decodes(8, 40), SIZE, graph=True) == 0
    assert count_shared_blocks(decodes(65, 128), SIZE, graph=True) == 128
    assert count_shared_blocks(decodes(64, 128), SIZE, graph=True) == 0


def test_only_groups_without_a_window_count() -> None:
    batch = decodes(8, 40)
    others = [list(reversed(item.block_ids)) for item in batch]
    groups = [
        item._replace(block_ids=[b for pair in zip(ids, item.block_ids, strict=True) for b in pair])
        for item, ids in zip(batch, others, strict=True)
    ]
    assert count_shared_blocks(groups, SIZE, False, (64, None)) == 40
    assert count_shared_blocks(groups, SIZE, False, (None, 64)) == 0
    assert count_shared_blocks(groups, SIZE, False, (None, None)) == 0
    assert count_shared_blocks(groups, SIZE, False, (64, 64)) == 0

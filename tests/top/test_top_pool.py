"""Who has which block, and the character for it."""

from __future__ import annotations

import pytest
from readings import sequence, view

from paged_backend.tools.top.pool import CACHED, FREE, Marks, Pool, private, shared


def make_pool(*sequences, **options):
    return Pool(view(*sequences, **options), range(len(sequences)))


def test_free_cached_private_and_shared_blocks_look_different():
    pool = make_pool(
        sequence("x", [1, 2, 3]), sequence("y", [1, 2, 4]), sequence("z", [1, 5]), cached=[6, 9]
    )
    expected = [shared(3), shared(2), private(0), private(1), private(2), CACHED, FREE, FREE]
    assert [pool.cell(block_id) for block_id in range(1, 9)] == expected
    assert len({cell.glyph for cell in expected}) == 7  # without any color
    assert pool.map(1)[:8] == expected
    assert len(pool.map(1)) == 99  # block 0 is nobody's
    assert (pool.num_private, pool.num_shared, pool.num_cached) == (3, 2, 2)
    assert pool.num_free == 99 - 3 - 2 - 2
    assert pool.num_saved == 8 - 5
    assert pool.num_shared_of(sequence("y", [1, 2, 4])) == 2


def test_a_block_of_very_many():
    pool = make_pool(*(sequence(str(number), [7]) for number in range(10)))
    assert pool.cell(7).glyph == "+"
    assert make_pool(*(sequence(str(n), [7]) for n in range(9))).cell(7).glyph == "9"


def test_the_null_block_belongs_to_nobody():
    pool = make_pool(sequence("x", [0, 0, 5]), sequence("y", [0, 6]), num_blocks=10)
    assert (pool.num_blocks, pool.num_private, pool.num_shared) == (9, 2, 0)
    assert pool.num_free == 7


def test_the_busiest_of_several_blocks_shows():
    pool = make_pool(sequence("x", [1, 4, 7]), sequence("y", [7]), cached=[5, 8], num_blocks=12)
    assert pool.map(3) == [private(0), private(0), shared(2), FREE]
    assert pool.map(100) == [shared(2)]
    assert make_pool(cached=[5], num_blocks=12).map(6) == [CACHED, FREE]


def test_a_sequence_keeps_its_mark_while_it_lives():
    marks = Marks()
    x, y, z = (sequence(name) for name in "xyz")
    assert marks.of([x, y]) == (0, 1)
    assert marks.of([y, z]) == (1, 0)  # the lowest that is free again
    assert marks.of([z, x, y]) == (0, 2, 1)
    assert marks.of([]) == ()
    assert marks.of([y, sequence("y", index=1)]) == (0, 1)  # two answers of one request


def test_marks_repeat_letters_only_in_other_colors():
    cells = [private(mark) for mark in range(468)]
    assert len(set(cells)) == len(cells)
    assert len({cell.glyph for cell in cells[:52]}) == 52


@pytest.mark.parametrize("blocks_per_cell", [1, 7, 64])
def test_a_large_pool(blocks_per_cell):
    pool = make_pool(sequence("x", range(1000, 1010)), num_blocks=500_001, cached=range(1010, 1500))
    cells = pool.map(blocks_per_cell)
    assert len(cells) == -(-500_000 // blocks_per_cell)
    assert cells.index(private(0)) == 999 // blocks_per_cell

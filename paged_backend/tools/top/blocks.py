"""The lower part of the screen: the block map, and the sequences that own the blocks."""

from __future__ import annotations

from itertools import groupby

from paged_client import SequenceView
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from paged_backend.tools.top import words
from paged_backend.tools.top.pool import CACHED, FREE, MANY, Cell, Pool, private, shared
from paged_backend.tools.top.watch import Blocks
from paged_backend.tools.top.words import QUIET, line

MAP_PART = 0.5  # maximum share of the height; independent of the content, for a stable scale
ID_WIDTH = 10


def draw_blocks(blocks: Blocks, width: int, height: int) -> Group:
    """Draw the lower part of the screen, exactly `width` wide and at most `height` high."""
    rows, title = _map(blocks, width - 4, round(height * MAP_PART) - 2)  # inside its frame
    panel = Panel(
        Group(*rows),
        title=title,
        title_align="left",
        subtitle=_legend(blocks.pool),
        subtitle_align="left",
    )
    return Group(panel, _sequences(blocks, height - len(rows) - 2))


def _map(blocks: Blocks, width: int, height: int) -> tuple[list[Text], str]:
    """The lines of the map, each starting with the id of its first block, and the title."""
    num_blocks = blocks.pool.num_blocks
    label_width = len(str(num_blocks))
    num_columns = width - label_width - 1
    per_cell = max(1, -(-num_blocks // (num_columns * height)))
    cells = blocks.pool.map(per_cell)
    rows = [
        line(
            (f"{start * per_cell + 1:>{label_width}} ", QUIET), _cells(cells[start:][:num_columns])
        )
        for start in range(0, len(cells), num_columns)
    ]
    scale = f", {per_cell} to a character, the busiest shows" if per_cell > 1 else ""
    return rows, f"{num_blocks:,} KV blocks of {blocks.view.block_size} tokens{scale}"


def _legend(pool: Pool) -> Text:
    one, two, many = private(0), shared(2), shared(MANY)
    return line(
        (one.glyph, one.style),
        f" private {pool.num_private:,}  ",
        (f"{two.glyph}-{MANY - 1} {many.glyph}", two.style),
        f" shared {pool.num_shared:,}, saving {pool.num_saved:,}  ",
        (CACHED.glyph, CACHED.style),
        f" cached {pool.num_cached:,}  ",
        (FREE.glyph, FREE.style),
        f" free {pool.num_free:,}",
    )


def _sequences(blocks: Blocks, height: int) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, expand=True, header_style=QUIET)
    table.add_column("")
    table.add_column("request", width=ID_WIDTH, no_wrap=True)
    table.add_column("state", width=12, no_wrap=True)
    for name in ("prompt", "output", "blocks", "shared"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("block table", no_wrap=True, overflow="ellipsis", ratio=1)
    rows = list(zip(blocks.view.sequences, blocks.marks, strict=True))
    rows.sort(key=lambda row: row[0].status != "running")  # stable: otherwise the server's order
    num_shown = height - 1 if len(rows) < height else height - 2
    for sequence, mark in rows[:num_shown]:
        table.add_row(*_sequence(sequence, mark, blocks.pool))
    if num_shown < len(rows):
        table.add_row("", f"{len(rows) - num_shown} more")
    return table


def _sequence(sequence: SequenceView, mark: int, pool: Pool) -> list[str | Text]:
    cell = private(mark)
    return [
        Text(cell.glyph, cell.style),
        sequence.request_id[-ID_WIDTH:],
        _state(sequence),
        words.count(sequence.num_prompt_tokens),
        words.count(sequence.num_tokens - sequence.num_prompt_tokens),
        words.count(len(sequence.block_ids)),
        words.count(pool.num_shared_of(sequence)),
        _cells([pool.cell(block_id) for block_id in sequence.block_ids]),
    ]


def _state(sequence: SequenceView) -> str:
    if sequence.status != "running":
        return sequence.status
    computed, whole = sequence.num_computed_tokens, sequence.num_prompt_tokens
    return "decode" if computed >= whole else f"prefill {computed / whole:.0%}"


def _cells(cells: list[Cell]) -> Text:
    text = line()
    for style, run in groupby(cells, key=lambda cell: cell.style):
        text.append("".join(cell.glyph for cell in run), style)
    return text

"""A peer that is measured in turn with the server: the ratio of each figure in each round."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from paged_backend.values.errors import ConfigError
from paged_loadtest.compare import Line, lines_of
from paged_loadtest.results import Run

PEER = "peer, "


@contextmanager
def errors_of_the_peer() -> Iterator[None]:
    """Let errors name the options of the peer in place of the server's.

    Raises:
        ConfigError: the peer or its model is not available.
    """
    try:
        yield
    except ConfigError as error:
        text = str(error)
        for name in ("--base-url", "--backend", "--model"):
            text = text.replace(name, f"--peer-{name.rpartition('-')[2]}")
        raise ConfigError(text) from None


def print_rounds(console: Console, runs: Sequence[Run]) -> None:
    """Print the medians of all rounds, and the ratios of the server to the peer.

    Args:
        console: where to print.
        runs: runs of the server and of the peer, in turn; the last round may lack the peer's.
    """
    rounds = [list(lines_of(*pair)) for pair in zip(runs[::2], runs[1::2], strict=False)]
    if not rounds:
        return
    table = Table(title=f"Medians of {len(rounds)} rounds", title_justify="left")
    table.add_column("figure")
    for name in ("server", "peer", "server is better by", "range"):
        table.add_column(name, justify="right")
    for lines in zip(*rounds, strict=True):
        ratios = sorted(ratio for ratio in map(_advantage, lines) if ratio is not None)
        cells = [
            f"{statistics.median(line.first for line in lines):.2f}",
            f"{statistics.median(line.second for line in lines):.2f}",
        ]
        if ratios:
            cells += [f"{statistics.median(ratios):.2f}", f"{ratios[0]:.2f} to {ratios[-1]:.2f}"]
        table.add_row(lines[0].name, *cells)
    console.print(table)


def _advantage(line: Line) -> float | None:
    """Return the ratio of the better figure to the worse; below 1 if the peer has the better."""
    best, other = line.first, line.second
    if not line.higher_is_better:
        best, other = other, best
    return best / other if other else None

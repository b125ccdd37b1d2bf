"""Flags that several kinds of bench have, and rows of figures as they are printed and saved."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeVar

if TYPE_CHECKING:
    from paged_backend.tools.bench.in_turn import TurnFigures

ROUNDS = 5  # rounds of a comparison

Flags: TypeAlias = argparse.ArgumentParser | argparse._ArgumentGroup
"""What flags are added to."""


class Row(Protocol):
    """A row of a table."""

    def line(self) -> str:
        """Return the row as text, under the header of the table."""
        ...


R = TypeVar("R", bound=Row)


def add_count(flags: Flags, flag: str, default: int, meaning: str) -> None:
    """Add a flag for a whole number of at least 1."""
    text = f"{meaning} (default: {default})"
    flags.add_argument(flag, type=count, default=default, help=text)


def add_counts(flags: Flags, flag: str, default: Sequence[int], meaning: str) -> None:
    """Add a flag for whole numbers of at least 1, separated by commas."""
    text = f"{meaning} (default: {','.join(map(str, default))})"
    flags.add_argument(flag, type=counts, default=list(default), help=text)


def add_threads(flags: Flags) -> None:
    """Add the flag that `use_threads` reads."""
    flags.add_argument("--threads", type=int, default=0, help="CPU threads (default: all)")


def use_threads(args: argparse.Namespace) -> None:
    """Limit the threads of torch, if the user does."""
    import torch

    if args.threads:
        torch.set_num_threads(args.threads)


def add_json(flags: Flags, content: str) -> None:
    """Add a flag for the file of the figures."""
    flags.add_argument("--json", type=Path, metavar="FILE", help=f"write {content} there, too")


def add_turns(flags: Flags) -> None:
    """Add the flags of benches that run requests in turn with others."""
    add_counts(flags, "--concurrency", (1, 4, 16), "requests at once")
    add_count(flags, "--rounds", ROUNDS, "rounds")
    add_threads(flags)
    add_json(flags, "the figures of all rounds")


def print_turns(args: argparse.Namespace, header: str, figures: Iterable[TurnFigures]) -> int:
    """Print each row of figures as soon as it is there, and save all of them."""
    from paged_backend.tools.bench.in_turn import save
    from paged_backend.values.garbage import keep_loaded

    keep_loaded()  # as the process of a served engine does
    rows = print_rows(header, figures)
    if args.json is not None:
        save(args.json, rows, command_line(), args.device)
    return 0


def print_rows(header: str, rows: Iterable[R]) -> list[R]:
    """Print each row as soon as it is there, and return all of them."""
    print(header)
    printed = []
    for row in rows:
        print(row.line(), flush=True)
        printed.append(row)
    return printed


def command_line() -> str:
    """Return the command that runs."""
    return shlex.join(["paged-backend", *sys.argv[1:]])


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be from 1, got {value}")
    return value


def counts(text: str) -> list[int]:
    """Parse whole numbers of at least 1, separated by commas."""
    return [count(part) for part in text.split(",")]


def positive(text: str) -> float:
    """Parse a number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value

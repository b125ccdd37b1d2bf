"""``paged-backend bench compare``: two saved reports side by side."""

from __future__ import annotations

import argparse
from pathlib import Path

from paged_loadtest.cli.options import Subparsers


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "compare",
        help="two files that --save wrote, as ratios",
        description="Print the figures of the runs that both files have, the ratio of the second "
        "to the first, and which options and circumstances differ.",
    )
    parser.add_argument("first", type=Path, metavar="A.json")
    parser.add_argument("second", type=Path, metavar="B.json")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read both reports and print the comparison."""
    from paged_loadtest.compare import print_comparison
    from paged_loadtest.report import make_console
    from paged_loadtest.results import load_report

    print_comparison(make_console(), load_report(args.first), load_report(args.second))
    return 0

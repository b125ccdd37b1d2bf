"""``paged-backend bench plot``: saved reports as a picture or a page."""

from __future__ import annotations

import argparse
from pathlib import Path

from paged_loadtest.cli.options import Subparsers, installed_extra


def add_parser(kinds: Subparsers) -> None:
    """Add the bench's flags."""
    parser = kinds.add_parser(
        "plot",
        help="files that --save wrote, as a picture or a page",
        description="Draw latency against throughput, the distributions of TTFT and ITL, and, if "
        "--metrics-url was given to the bench, KV use and requests over time. One file shows all "
        "its runs, several files the fastest run of each.",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE.json")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="ends in .png, or in .html for one page that needs nothing else",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Draw the saved reports into the output file."""
    from paged_loadtest.plot import plot

    with installed_extra():
        plot(args.files, args.output)
    print(f"Saved to {args.output}")
    return 0

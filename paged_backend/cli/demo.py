"""``paged-backend demo``: three questions at once to a real server, and what it cost."""

from __future__ import annotations

import argparse

from paged_backend.cli.options import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the command, which has no flags."""
    parser = subparsers.add_parser(
        "demo", help="three questions at once to a real server", description=__doc__
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo and return its exit status: 1 if an answer is wrong."""
    from paged_backend.tools.demo.show import show

    return show()

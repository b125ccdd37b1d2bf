"""``paged-backend demo``: a real server with a bundled model, and what it answers."""

from __future__ import annotations

import argparse

from paged_backend.cli.options import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "demo", help="start a server with a bundled model and show answers", description=__doc__
    )
    parser.add_argument(
        "show",
        nargs="?",
        choices=("questions", "tools"),
        default="questions",
        help="questions: three streams at once, and what they cost; tools: a tool call and a "
        "constrained answer side by side (default: %(default)s)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the demo and return its exit status: 1 if an answer is wrong."""
    if args.show == "tools":
        from paged_backend.tools.demo.lookup.show import show_tools

        return show_tools()
    from paged_backend.tools.demo.show import show

    return show()

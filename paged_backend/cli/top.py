"""``paged-backend top``: watch a running server, its latencies and its KV blocks.

The block map needs a server with --enable-inspect; everything else comes from its metrics.
"""

from __future__ import annotations

import argparse

from paged_backend.cli.options import Subparsers
from paged_backend.tools.top.options import TopOptions
from paged_backend.values.errors import ConfigError
from paged_backend.values.flags import add_flags, flag_values


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser("top", help="watch a running server", description=__doc__)
    add_flags(parser, TopOptions)
    parser.add_argument("--once", action="store_true", help="print one frame and end")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show the server until the user quits, or print one frame with --once."""
    options = TopOptions(**flag_values(args, TopOptions))
    try:
        from paged_backend.tools.top.live import print_once, show
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'paged-backend[loadtest]'") from None
    if args.once:
        print_once(options)
    else:
        show(options)
    return 0

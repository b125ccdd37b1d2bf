"""``paged-backend worker``: the ranks of one host, for a model that several hosts compute."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from paged_backend.cli.options import Subparsers
from paged_backend.values.errors import option_error
from paged_backend.values.flags import add_flags, flag_values
from paged_backend.values.log import LEVELS, log_to_stderr
from paged_backend.values.nodes import Nodes, read_key
from paged_backend.values.options.nodes import NodeOptions
from paged_backend.values.validation import check_fields


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "worker",
        help="compute a part of a model for a server on another host",
        usage="paged-backend worker [OPTION ...]",
        description="Run this host's ranks of a model that several hosts compute. The server on "
        "node 0 says which model that is, and with which options. The command waits for "
        "the server, starts its ranks anew whenever the server's engine starts anew, and runs "
        "until Ctrl-C or SIGTERM.",
        epilog="The model must exist on this host at the same path as on node 0, or be on the "
        "Hugging Face Hub.",
    )
    add_flags(parser, NodeOptions)
    parser.add_argument(
        "--joined-file",
        type=Path,
        metavar="PATH",
        help="make this empty file when node 0 is connected for the first time, for a startup "
        "probe of Kubernetes",
    )
    parser.add_argument("--log-level", choices=LEVELS, default="info", help="(default: info)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    options = NodeOptions(**flag_values(args, NodeOptions))
    check_fields(options, option_error)
    nodes = Nodes.of(options, os.environ)
    if nodes.number == 1:
        raise option_error("nnodes", "must be 2 or more: a worker computes with a server")
    if nodes.rank == 0:
        raise option_error("node_rank", "must be 1 or more: node 0 runs paged-backend serve")
    key = read_key(options, os.environ)
    log_to_stderr(args.log_level)
    # As the first process of a container, it would not end by itself.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

    from paged_backend.engine.node import run_node

    run_node(nodes, key, args.joined_file)

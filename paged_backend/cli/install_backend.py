"""``paged-backend install-backend``: serve models of two lines of config.pbtxt.

A model's folder then holds config.pbtxt with `backend: "paged"` (or "vllm") and an
instance_group, and 1/model.json with the engine's options.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paged_backend.cli.options import Subparsers


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "install-backend", help="add this backend to a tritonserver", description=__doc__
    )
    parser.add_argument(
        "directory",
        metavar="DIR",
        type=Path,
        help="the server's backend directory, for example /opt/tritonserver/backends",
    )
    parser.add_argument(
        "--name",
        action="append",
        help="what config.pbtxt calls it; may be repeated (default: paged and vllm)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the backend's folders and print their paths."""
    from paged_backend.launch.backend import BACKEND_NAMES, install_backend

    for folder in install_backend(args.directory, args.name or BACKEND_NAMES):
        print(folder)
    return 0

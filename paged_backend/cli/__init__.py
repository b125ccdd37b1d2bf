"""The command line, ``paged-backend``.

Each subcommand is a module of this package; `options` makes flags of the engine's options. Begin
with `serve`.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

from paged_backend.cli import (
    bench,
    demo,
    dynamo,
    gateway,
    generate,
    install_backend,
    plan,
    quantize,
    serve,
    top,
    worker,
)
from paged_backend.values.errors import PagedError

DESCRIPTION = """\
Serve large language models on NVIDIA Triton Inference Server, and ask, watch and measure them.

  paged-backend serve /models/Llama-3.1-8B    serve a checkpoint over gRPC and HTTP
  paged-backend gateway --port 9000           OpenAI's and Anthropic's APIs in front of it
"""
COMMANDS = (
    serve,
    worker,
    gateway,
    dynamo,
    generate,
    demo,
    bench,
    top,
    plan,
    quantize,
    install_backend,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit status.

    For a user's mistake, print one line to stderr and return 2; with --traceback, raise it.
    """
    parser = argparse.ArgumentParser(
        prog="paged-backend",
        description=DESCRIPTION,
        epilog="paged-backend COMMAND --help describes a command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"paged-backend {_version()}")
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        status: int = args.run(args)
    except PagedError as error:
        if args.traceback:
            raise
        print(f"paged-backend: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _version() -> str:
    """Return the version of the installed package."""
    try:
        return importlib.metadata.version("paged-backend")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed: it runs from its source)"

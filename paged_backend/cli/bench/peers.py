"""Flags that choose the engine to compare with."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from paged_backend.tools.bench.peer_options import PeerOptions
from paged_backend.values.errors import ConfigError


def add_peer(
    parser: argparse.ArgumentParser, names: Iterable[str], default: str
) -> argparse._ArgumentGroup:
    """Add the flags that name a peer and its interpreter; `default` describes transformers."""
    group = parser.add_argument_group("peer")
    choice = group.add_mutually_exclusive_group()
    choice.add_argument(
        "--peer",
        choices=names,
        default="transformers",
        help=f"the engine to compare with (default: transformers, {default})",
    )
    choice.add_argument(
        "--no-peer", dest="peer", action="store_const", const=None, help="compare with nothing"
    )
    group.add_argument(
        "--peer-python",
        metavar="PATH",
        help="the interpreter of the peer's environment (default for transformers: this one)",
    )
    return group


def chosen_peer(args: argparse.Namespace, dtype: str | None = None) -> PeerOptions | None:
    """Return the peer to measure, None for no peer.

    Args:
        args: the parsed flags.
        dtype: the number format that the peer should have.

    Raises:
        ConfigError: the options do not fit together.
    """
    if args.peer is not None:
        return PeerOptions(args.peer, args.peer_python, dtype)
    for flag, value in (("--peer-python", args.peer_python), ("--peer-dtype", dtype)):
        if value is not None:
            raise ConfigError(f"{flag}: cannot be used with --no-peer")
    return None

"""``paged-backend gateway``: OpenAI's HTTP API in front of one or more running servers."""

from __future__ import annotations

import argparse
import math
import re
import socket

from paged_backend.cli.gateway_options import add_gateway_options, gateway_values
from paged_backend.cli.options import Subparsers
from paged_backend.values.errors import ConfigError
from paged_backend.values.garbage import without_collections

_ADDRESS = re.compile(r"[^/\s]+:\d+")


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "gateway", help="speak OpenAI's HTTP API for running servers", description=__doc__
    )
    parser.add_argument(
        "--triton",
        action="append",
        metavar="HOST:PORT",
        help="a server's gRPC address; may be repeated (default: 127.0.0.1:8001)",
    )
    parser.add_argument(
        "--triton-metrics",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="the metrics address of a server whose metrics the gateway's /metrics has, too; may "
        "be repeated: the metrics of several servers get a label `server`",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address (default: loopback only)")
    # The second name of an option is from Triton's OpenAI frontend.
    parser.add_argument("--port", "--openai-port", type=int, default=9000, help="default: 9000")
    parser.add_argument(
        "--served-model-name",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="names under which clients know the only model, or NAME=MODEL, for one of several; "
        "answers have the first one (default: the models' names on their servers)",
    )
    add_gateway_options(parser)
    parser.add_argument(
        "--drain-timeout",
        type=float,
        default=20.0,
        metavar="SECONDS",
        help="for how long running requests may go on after SIGTERM (default: 20)",
    )
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)  # the launcher's socket
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from paged_backend.launch.ports import bind, listen

    try:
        with without_collections():
            from paged_client.gateway import GatewayOptions, read_served_names, serve
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'paged-backend[gateway]'") from None
    triton = tuple(args.triton or ["127.0.0.1:8001"])
    for option, kind, addresses in (
        ("--triton", "gRPC", triton),
        ("--triton-metrics", "metrics", args.triton_metrics),
    ):
        for address in addresses:
            if not _ADDRESS.fullmatch(address):
                raise ConfigError(
                    f"{option}: must be host:port of a {kind} endpoint, got {address!r}"
                )
    try:
        names = read_served_names(args.served_model_name)
    except ValueError as error:
        raise ConfigError(f"--served-model-name: {error}") from None
    if not 0 <= args.drain_timeout < math.inf:
        raise ConfigError(f"--drain-timeout: must be at least 0, got {args.drain_timeout:g}")
    options = GatewayOptions(
        triton,
        drain_timeout_s=args.drain_timeout,
        triton_metrics=tuple(args.triton_metrics),
        served_names=names,
        **gateway_values(args),
    )
    if args.fd is None:
        listener = bind(args.host, args.port, "port")
        listen(listener)
        print("gateway listens on http://{}:{}".format(*listener.getsockname()), flush=True)
    else:
        listener = socket.socket(fileno=args.fd)
    serve(options, listener)
    return 0

"""``paged-backend gateway``: OpenAI's HTTP API in front of one or more running servers."""

from __future__ import annotations

import argparse
import math
import re
import socket
from pathlib import Path

from paged_backend.cli.options import Subparsers
from paged_backend.errors import ConfigError

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
    # The second name of an option is that of Triton's OpenAI frontend.
    parser.add_argument("--port", "--openai-port", type=int, default=9000, help="default: 9000")
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="KEY or TENANT KEY on each line; default: those in PAGED_API_KEYS, with commas "
        "between them. Without any, everybody is let in",
    )
    parser.add_argument(
        "--openai-restricted-api",
        nargs=3,
        action="append",
        default=[],
        metavar=("APIS", "HEADER", "VALUE"),
        help="require a header of requests to these routes, one or more of inference, "
        "model-repository, metrics and health with commas between them; may be repeated. Other "
        "users of this machine can see the value in the list of processes",
    )
    parser.add_argument("--request-timeout", type=float, help="seconds for a whole answer")
    parser.add_argument(
        "--share-prefix-cache",
        action="store_true",
        help="with API keys: prompts without a cache_salt share cached blocks across tenants, who "
        "then learn from cached_tokens which prompts others have sent. Default: each tenant has a "
        "salt, and no two tenants share blocks",
    )
    parser.add_argument(
        "--max-body-bytes",
        "--http-max-input-size",
        type=int,
        default=2**20,
        metavar="BYTES",
        help="of a request's body, from 1024 to 16777216 (default: 1048576)",
    )
    parser.add_argument(
        "--max-stream-backlog",
        type=int,
        default=4096,
        metavar="TOKENS",
        help="of a stream that may wait for its reader, which is ended beyond it (default: 4096)",
    )
    parser.add_argument(
        "--max-connections",
        type=int,
        default=8192,
        metavar="N",
        help="connections open at once, from 1; beyond it idle ones are closed for new ones, and "
        "if none is idle, new ones are refused. At most the number of open files that this "
        "process may have, less 64 (default: 8192)",
    )
    parser.add_argument(
        "--max-connections-per-address",
        type=int,
        metavar="N",
        help="connections of one address open at once, from 1; an IPv6 network of 64 bits is one "
        "address (default: half of --max-connections, and no limit for loopback addresses)",
    )
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
        from paged_client.gateway import (
            GatewayOptions,
            limits,
            read_keys,
            read_restrictions,
            serve,
        )
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
        restrictions = read_restrictions(args.openai_restricted_api)
    except ValueError as error:
        raise ConfigError(f"--openai-restricted-api: {error}") from None
    try:
        keys = read_keys(args.api_key_file)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if args.request_timeout is not None and args.request_timeout <= 0:
        raise ConfigError(f"--request-timeout: must be above 0, got {args.request_timeout:g}")
    low, high = limits.MIN_BODY_BYTES, limits.MAX_BODY_BYTES
    if not low <= args.max_body_bytes <= high:
        raise ConfigError(
            f"--max-body-bytes: must be from {low} to {high}, got {args.max_body_bytes}"
        )
    if args.max_stream_backlog < 1:
        raise ConfigError(
            f"--max-stream-backlog: must be at least 1, got {args.max_stream_backlog}"
        )
    if not 0 <= args.drain_timeout < math.inf:
        raise ConfigError(f"--drain-timeout: must be at least 0, got {args.drain_timeout:g}")
    for flag, number in (
        ("--max-connections", args.max_connections),
        ("--max-connections-per-address", args.max_connections_per_address),
    ):
        if number is not None and number < 1:
            raise ConfigError(f"{flag}: must be at least 1, got {number}")
    options = GatewayOptions(
        triton,
        keys,
        args.request_timeout,
        args.max_body_bytes,
        max_stream_backlog=args.max_stream_backlog,
        drain_timeout_s=args.drain_timeout,
        share_prefix_cache=args.share_prefix_cache,
        triton_metrics=tuple(args.triton_metrics),
        restrictions=restrictions,
        max_connections=args.max_connections,
        max_connections_per_address=args.max_connections_per_address,
    )
    if args.fd is None:
        listener = bind(args.host, args.port, "port")
        listen(listener)
        print("gateway listens on http://{}:{}".format(*listener.getsockname()), flush=True)
    else:
        listener = socket.socket(fileno=args.fd)
    serve(options, listener)
    return 0

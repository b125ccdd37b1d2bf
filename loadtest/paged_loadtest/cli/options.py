"""Flags shared by the benchmarks of a running server."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paged_backend.tools.workloads.options import WorkloadOptions
from paged_backend.values.errors import ConfigError
from paged_backend.values.flags import add_flags, flag_values
from paged_loadtest.options import TargetOptions

if TYPE_CHECKING:
    from paged_loadtest.session import Session

Subparsers = Any
"""What ``ArgumentParser.add_subparsers`` returns; argparse does not name its type."""


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags for the server to measure and for the measured figures."""
    add_flags(parser.add_argument_group("server"), TargetOptions)
    group = parser.add_argument_group("figures")
    group.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="NAME:MS",
        help="a limit on ttft, tpot, itl or e2e in milliseconds, such as ttft:500; may be "
        "repeated: goodput counts the requests that keep them all",
    )
    group.add_argument(
        "--metrics-url",
        metavar="URL",
        help="the server's metrics, such as http://127.0.0.1:8002/metrics: its KV use and queue "
        "are sampled during the run",
    )
    group.add_argument(
        "--save", type=Path, metavar="FILE", help="write everything there as JSON, for plot, too"
    )


def add_workload_options(
    parser: argparse.ArgumentParser, *, leave_out: Collection[str] = ()
) -> None:
    """Add the flags that describe the requests to send."""
    add_flags(parser.add_argument_group("workload"), WorkloadOptions, leave_out=leave_out)


def session(args: argparse.Namespace) -> Session:
    """Create a session from the flags for the server and the figures.

    Raises:
        ConfigError: an option cannot be used, or a library is missing.
    """
    try:
        from paged_loadtest.session import Session
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'paged-backend[loadtest]'") from None
    from paged_loadtest.slo import parse_slo

    return Session(
        target=TargetOptions(**flag_values(args, TargetOptions)),
        slos=[parse_slo(text) for text in args.slo],
        metrics_url=args.metrics_url,
        save=args.save,
    )


def workload(args: argparse.Namespace) -> WorkloadOptions:
    """Create the workload options from the flags that describe the requests.

    Raises:
        ConfigError: an option cannot be used.
    """
    values = flag_values(args, WorkloadOptions)
    if args.backend == "openai-chat" and values["prompt_format"] is None:
        values["prompt_format"] = "chat"
    return WorkloadOptions(**values)

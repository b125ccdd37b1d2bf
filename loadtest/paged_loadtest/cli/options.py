"""Flags and runs that the benchmarks of a running server share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from paged_backend.tools.workloads.options import WorkloadOptions
from paged_backend.values.errors import ConfigError
from paged_backend.values.flags import add_flags, flag_values
from paged_backend.values.validation import DataclassInstance
from paged_loadtest.options import TargetOptions

if TYPE_CHECKING:
    from paged_loadtest.session import Session

T = TypeVar("T", bound=DataclassInstance)
Subparsers = Any
"""What ``ArgumentParser.add_subparsers`` returns; argparse does not name its type."""


def add_bench(
    kinds: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    group: str,
    options: type[DataclassInstance],
    fixed: Mapping[str, Any] | None = None,
    **texts: str,
) -> None:
    """Add a subcommand of bench with flags for the server, the figures, itself and the workload.

    Args:
        kinds: argparse's subcommands, to which it is added.
        name: name of the bench.
        run: called with the parsed flags; returns the exit status.
        group: title of the bench's own flags.
        options: dataclass of the bench's own flags.
        fixed: workload options that have no flag, and their values.
        texts: what argparse takes to show, such as `help` and `description`.
    """
    parser = kinds.add_parser(name, **texts)
    add_flags(parser.add_argument_group("server"), TargetOptions)
    figures = parser.add_argument_group("figures")
    figures.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="NAME:MS",
        help="a limit on ttft, tpot, itl or e2e in milliseconds, such as ttft:500; may be "
        "repeated: goodput counts the requests that keep them all",
    )
    figures.add_argument(
        "--metrics-url",
        metavar="URL",
        help="the server's metrics, such as http://127.0.0.1:8002/metrics: its KV use and queue "
        "are sampled during the run",
    )
    figures.add_argument(
        "--save", type=Path, metavar="FILE", help="write everything there as JSON, for plot, too"
    )
    add_flags(parser.add_argument_group(group), options)
    leave_out = fixed or {}
    add_flags(parser.add_argument_group("workload"), WorkloadOptions, leave_out=leave_out)
    parser.set_defaults(run=run, **leave_out)


def measured(
    args: argparse.Namespace,
    options: type[T],
    measure: Callable[[Session, WorkloadOptions, T], int],
) -> int:
    """Measure with the options that the flags give, and return the exit status.

    Raises:
        ConfigError: an option cannot be used.
    """
    from paged_loadtest.session import Session
    from paged_loadtest.slo import parse_slo

    own = options(**flag_values(args, options))
    session = Session(
        target=TargetOptions(**flag_values(args, TargetOptions)),
        slos=[parse_slo(text) for text in args.slo],
        metrics_url=args.metrics_url,
        save=args.save,
    )
    values = flag_values(args, WorkloadOptions)
    if args.backend == "openai-chat" and values["prompt_format"] is None:
        values["prompt_format"] = "chat"
    return measure(session, WorkloadOptions(**values), own)


@contextmanager
def installed_extra() -> Iterator[None]:
    """Report a library that an import in this block lacks.

    Raises:
        ConfigError: a library is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'paged-backend[loadtest]'") from None

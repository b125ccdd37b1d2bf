"""``paged-backend dynamo``: serve a model as a worker of NVIDIA Dynamo, in the foreground."""

from __future__ import annotations

import argparse

from paged_backend.cli.options import Subparsers, add_engine_options, engine_options
from paged_backend.dynamo.options import WorkerOptions, check_engine_options
from paged_backend.values.engine_args import from_mapping
from paged_backend.values.errors import ConfigError
from paged_backend.values.flags import add_flags, flag_values
from paged_backend.values.log import log_to_stderr


def add_parser(subparsers: Subparsers) -> None:
    """Add the command's flags."""
    parser = subparsers.add_parser(
        "dynamo",
        help="serve a model as a worker of NVIDIA Dynamo",
        usage="paged-backend dynamo [MODEL] [OPTION ...]",
        description="Serve a model as a worker of NVIDIA Dynamo until Ctrl-C or SIGTERM. Dynamo's "
        "frontend renders chats, tokenizes and detokenizes.",
        epilog="A Dynamo option that is left out has the value of its environment variable, such "
        "as DYN_NAMESPACE, or Dynamo's default.",
    )
    add_engine_options(parser)
    add_flags(parser.add_argument_group("Dynamo"), WorkerOptions)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    changed = engine_options(args)
    config = from_mapping(changed).config
    check_engine_options(changed, config)
    options = WorkerOptions(**flag_values(args, WorkerOptions))
    try:
        from paged_backend.dynamo import worker
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error}: pip install 'paged-backend[dynamo]'") from None
    log_to_stderr(config.log_level)
    worker.run(config, options)
    return 0

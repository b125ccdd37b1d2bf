"""``paged-backend worker``: the ranks of one host, for a model that several hosts compute."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from paged_backend.cli.options import Subparsers
from paged_backend.values.errors import option_error
from paged_backend.values.flags import add_flags, flag_values
from paged_backend.values.log import LEVELS, log_to_stderr
from paged_backend.values.nodes import Nodes, read_key
from paged_backend.values.options.nodes import NodeOptions
from paged_backend.values.validation import check_fields

_SIGNALS = {signal.SIGTERM: 0, signal.SIGINT: 130}  # each with the exit status
_AGAIN_S = 0.25  # between two deliveries of a signal to the main thread
_END_S = 10.0  # after which the process ends without cleaning up


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
    _end_at_signals()

    from paged_backend.engine.node import run_node

    run_node(nodes, key, args.joined_file)


def _end_at_signals() -> None:
    """Let SIGTERM and SIGINT end this process within seconds, whatever it does.

    A handler is needed for SIGTERM, which the first process of a container would otherwise ignore.
    But Python calls it on the main thread only, between two instructions: not while the thread
    waits in a system call, if the signal came right before it or reached another thread. And in a
    destructor, the exception that it raises is lost. So another thread reads from the pipe to which
    Python writes each signal, and makes sure that the main thread has heard it.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _SIGNALS:
        signal.signal(number, _end)
    threading.Thread(target=_insist, args=(reader,), name="signals", daemon=True).start()


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Leave the main thread's code; while it cleans up, further signals have no effect."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(0)


def _insist(reader: int) -> NoReturn:
    """Wait for a signal, and send it to the main thread until the process ends; then end it.

    The kernel ends ranks with this process.
    """
    number = signal.Signals(os.read(reader, 1)[0])
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    deadline = time.monotonic() + _END_S
    while time.monotonic() < deadline:
        time.sleep(_AGAIN_S)
        signal.pthread_kill(main_thread, number)
    os._exit(_SIGNALS[number])

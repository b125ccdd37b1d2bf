"""The engine's process: ``python -P -m paged_backend.process.engine_process``.

The process ends when the server ends. It begins to watch the server before it imports the modules
that take seconds to import.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from pathlib import Path

from paged_backend.process.lifetime import ProcessId, end_with
from paged_backend.values.garbage import without_collections
from paged_backend.values.log import log_to_stderr

SERVER_GRACE_S = 2.0  # how long the loop may take to end by itself after the server


def main() -> int:
    """Serve one model; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--server", type=ProcessId.parse, required=True, metavar="PID-START")
    parser.add_argument("--number", type=int, default=0, help="number among the model's engines")
    parser.add_argument("--config", required=True, help="engine options as a JSON object")
    args = parser.parse_args()
    faulthandler.enable()  # a crash writes its Python stack into the server's log
    # Ctrl-C in a terminal reaches the whole process group; only the server must act on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with(args.server, SERVER_GRACE_S, args.run_dir)
    log_to_stderr("info")  # the options may choose another level once they are read

    with without_collections():
        from paged_backend.process.engine_loop import serve

    return serve(args.config, args.run_dir, args.server, args.number)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # a regular exit of the interpreter takes seconds

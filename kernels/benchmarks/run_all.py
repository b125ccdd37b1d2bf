"""Runs benchmarks, each in a process of its own, and collects their figures in one file.

Each row is in the file as soon as it is measured, so that a run that is killed leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
TIMEOUT, GRACE = 170, 15  # seconds per benchmark, and to end after an interrupt


def run(name: str, options: list[str], file: Path) -> bool:
    """Run one benchmark, which adds its rows to the file; return whether it succeeded."""
    print(f"\n{name}", flush=True)
    command = [sys.executable, str(FOLDER / "run_one.py"), name, "--json", str(file), "--add"]
    # Background jobs of a shell ignore this signal, and the benchmark would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return _waited(subprocess.Popen([*command, *options]))


def _waited(process: subprocess.Popen[bytes]) -> bool:
    """Wait for the process; return whether it succeeded in time."""
    try:
        return process.wait(TIMEOUT) == 0
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # it still writes what it has measured
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return False


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command-line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as well")
    parser.add_argument(
        "--only", metavar="NAME", nargs="+", choices=NAMES, default=NAMES, help="run these alone"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that all runs")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parsed()
    options = ["--quick"] if arguments.quick else []
    with tempfile.TemporaryDirectory() as folder:
        file: Path = arguments.json or Path(folder, "rows.json")
        file.unlink(missing_ok=True)
        failed = [name for name in arguments.only if not run(name, options, file)]
        rows = json.loads(file.read_text())["rows"] if file.exists() else []
    missed = [f"{row['name']} {row.get('shape', '')}" for row in rows if row.get("met") is False]
    print("\ntargets missed:", ", ".join(missed) or "none")
    print("benchmarks failed:", ", ".join(failed) or "none")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

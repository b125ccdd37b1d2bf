"""Runs all benchmarks, each in a process of its own, and collects their figures in one file."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import save

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))
TIMEOUT, GRACE = 180, 15  # seconds for each, and for one that was told to end


def run(name: str, options: list[str], rows: list[dict[str, Any]]) -> bool:
    """Run one benchmark and add its rows; whether it came to its end."""
    print(f"\n{name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, str(FOLDER / f"bench_{name}.py"), "--json", str(file), *options]
        # A job in a shell's background has this signal ignored, and so would the benchmark.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        ended = _waited(subprocess.Popen(command))
        if file.exists():  # one that failed leaves what it had measured
            rows += json.loads(file.read_text())["rows"]
    return ended


def _waited(process: subprocess.Popen[bytes]) -> bool:
    """Whether it ends well, and in time."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as well")
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that all runs")
    arguments = parser.parse_args()
    options = ["--quick"] if arguments.quick else []
    rows: list[dict[str, Any]] = []
    failed = []
    for name in arguments.only:
        if not run(name, options, rows):
            failed.append(name)
        if arguments.json is not None:  # each time: a later one may hang the machine
            save(arguments.json, rows)
    missed = [f"{row['name']} {row.get('shape', '')}" for row in rows if row.get("met") is False]
    print("\ntargets missed:", ", ".join(missed) or "none")
    print("benchmarks failed:", ", ".join(failed) or "none")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()

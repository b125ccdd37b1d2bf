"""Runs one benchmark: ``python run_one.py NAME`` for the module ``bench_NAME``.

The module has a function `run`, and some have a `sweep` that searches for launch configurations.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from measure import DEVICE, Bench, verdict
from paged_kernels.device import INTERPRETED

from paged_backend.tools.bench.environment import environment
from paged_backend.values.json_file import write_json


def _circumstances() -> dict[str, str]:
    return environment(DEVICE) | ({"device": "interpreter"} if INTERPRETED else {})


class ResultsFile:
    """A JSON file of rows and environment; it stays complete even if a write is interrupted."""

    def __init__(self, path: Path, *, add: bool = False) -> None:
        """Keep the rows that the file already has with `add`."""
        self._path = path
        self._environment = _circumstances()
        self._before = json.loads(path.read_text())["rows"] if add and path.exists() else []

    def write(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write the kept rows, followed by these rows."""
        content = {"environment": self._environment, "rows": [*self._before, *rows]}
        write_json(self._path, content, indent=2)


def parsed() -> argparse.Namespace:
    """Parse the command-line options."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", metavar="NAME", help="such as rms_norm")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures there as well")
    parser.add_argument("--add", action="store_true", help="keep the rows that FILE has already")
    parser.add_argument("--quick", action="store_true", help="tiny shapes, to see that all runs")
    parser.add_argument(
        "--sweep", action="store_true", help="search for the best launch configurations instead"
    )
    arguments = parser.parse_args()
    if importlib.util.find_spec(f"bench_{arguments.name}") is None:
        parser.error(f"NAME: there is no bench_{arguments.name}.py")
    return arguments


def main() -> None:
    """Run the benchmark, or its search for configurations.

    Raises:
        SystemExit: it has no search.
    """
    arguments = parsed()
    module = importlib.import_module(f"bench_{arguments.name}")
    if arguments.sweep and not hasattr(module, "sweep"):
        raise SystemExit(f"--sweep: {arguments.name} has no launch configurations to search")
    print(*_circumstances().values(), sep="  ", flush=True)
    file = None if arguments.json is None else ResultsFile(arguments.json, add=arguments.add)

    def keep(bench: Bench) -> None:
        if file is not None:
            file.write([{"bench": module.__name__, **row} for row in bench.as_json()])

    bench = Bench(quick=arguments.quick, keep=keep)
    try:
        if arguments.sweep:
            module.sweep(bench)
            return
        module.run(bench)
        count, names = len(bench.compiled), " ".join(sorted(set(bench.compiled)))
        print(f"compilations after warm-up: {count} {names} {verdict(not count)}: 0", flush=True)
    finally:
        keep(bench)  # write again: a kernel may have been compiled after the last row


if __name__ == "__main__":
    main()

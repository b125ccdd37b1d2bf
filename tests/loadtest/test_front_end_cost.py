"""The cost of streamed responses: the script runs, and counts every process and token."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "loadtest" / "front_end_cost.py"

pytestmark = pytest.mark.server


def test_figures_of_each_process() -> None:
    flags = ["--streams", "2", "--rounds", "2", "--output-len", "8", "--step-ms", "5"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *flags], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    summary, *rows = done.stdout.splitlines()
    found = re.search(r"(\d+) responses, (\S+) tokens in each", summary)
    assert found is not None
    assert int(found[1]) * float(found[2]) == pytest.approx(2 * 2 * 8, rel=0.02)
    assert [row[:13].strip() for row in rows] == ["engine", "front ends", "tritonserver", "client"]
    assert all(float(figure) >= 0 for row in rows for figure in re.findall(r"(\S+) us", row))

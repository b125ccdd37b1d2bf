"""How all pictures look, and the words above them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_loadtest.plot.series import Series

STYLE: Any = {  # matplotlib's type for it lists all its settings
    "font.size": 11,
    "axes.titlesize": 13,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 12,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "lines.linewidth": 2,
    "legend.fontsize": 10.5,
    "legend.framealpha": 0.85,
    "svg.hashsalt": "paged",  # the same picture for the same figures
}


def heading(series: Sequence[Series]) -> str:
    """Which benches these are."""
    kinds = sorted({entry.report.kind for entry in series})
    models = sorted({str(entry.report.config.get("model", "unknown")) for entry in series})
    return f"paged-backend bench {', '.join(kinds)}: {', '.join(models)}"


def circumstances(entry: Series) -> str:
    """The workload, the way to the server and the machine of one report."""
    config, environment = entry.report.config, entry.report.environment
    workload = str(config.get("dataset_name", "prefix"))
    prompt_len = config.get("prompt_len") or config.get("input_len")
    lengths = [(prompt_len, "input"), (config.get("output_len"), "output")]
    words = [workload, *(f"{name} {value}" for value, name in lengths if value is not None)]
    machine = f"{environment.get('device', 'unknown')}, {environment.get('cores', '?')} cores"
    where = f"{config.get('backend', 'unknown')} at {config.get('base_url', 'unknown')}"
    commit = environment.get("commit", "unknown")
    return " · ".join([", ".join(words), where, machine, f"commit {commit}"])

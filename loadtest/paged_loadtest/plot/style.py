"""The style of all plots, and their headings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paged_loadtest.plot.series import Series

PANEL_INCHES = (6.4, 4.2)
STYLE: Any = {  # matplotlib's own type enumerates every setting
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
    "svg.hashsalt": "paged",  # equal data give an identical SVG
}


def heading(series: Sequence[Series]) -> str:
    """Return the heading: the benches and models of the reports."""
    kinds = sorted({entry.report.kind for entry in series})
    models = sorted({str(entry.report.config.get("model", "unknown")) for entry in series})
    return f"paged-backend bench {', '.join(kinds)}: {', '.join(models)}"


def circumstances(series: Sequence[Series]) -> list[str]:
    """Describe the workload, server address, machine and commit of each report.

    A text begins with the report's name if there are several.
    """
    several = len(series) > 1
    return [(f"{entry.name}: " if several else "") + _circumstances(entry) for entry in series]


def _circumstances(entry: Series) -> str:
    config, environment = entry.report.config, entry.report.environment
    workload = str(config.get("dataset_name", "prefix"))
    prompt_len = config.get("prompt_len") or config.get("input_len")
    lengths = [(prompt_len, "input"), (config.get("output_len"), "output")]
    words = [workload, *(f"{name} {value}" for value, name in lengths if value is not None)]
    machine = f"{environment.get('device', 'unknown')}, {environment.get('cores', '?')} cores"
    where = f"{config.get('backend', 'unknown')} at {config.get('base_url', 'unknown')}"
    commit = environment.get("commit", "unknown")
    return " · ".join([", ".join(words), where, machine, f"commit {commit}"])

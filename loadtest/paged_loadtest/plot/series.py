"""Chooses the runs and colors to draw for each report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib import colormaps
from matplotlib.colors import to_hex

from paged_backend.values.errors import ConfigError
from paged_loadtest.results import Report, Run

# Distinguishable with any color vision.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#444444")


@dataclass(frozen=True, slots=True)
class DrawnRun:
    """A run to draw in the distribution and time panels."""

    name: str
    color: str
    run: Run


@dataclass(frozen=True, slots=True)
class Series:
    """A report to draw."""

    name: str
    color: str
    report: Report
    drawn: list[DrawnRun]


def make_series(names: Sequence[str], reports: Sequence[Report]) -> list[Series]:
    """Show all runs of a single report, from dark to bright, or one run of each of several.

    Raises:
        ConfigError: a report has no run with a successful request.
    """
    answered = [replace(report, runs=_answered(report)) for report in reports]
    for name, report in zip(names, answered, strict=True):
        if not report.runs:
            raise ConfigError(f"{name} holds no request that succeeded; there is nothing to draw")
    if len(answered) == 1:
        return [Series(names[0], _COLORS[0], answered[0], _all_runs(answered[0].runs))]
    series = []
    for index, (name, report) in enumerate(zip(names, answered, strict=True)):
        color = _COLORS[index % len(_COLORS)]
        run = _representative(report, answered)
        series.append(Series(name, color, report, [DrawnRun(f"{name}, {run.label}", color, run)]))
    return series


def _answered(report: Report) -> list[Run]:
    return [run for run in report.runs if run.num_completed]


def _representative(report: Report, reports: Sequence[Report]) -> Run:
    """The last run that all reports have in common; if there is none, the fastest run."""
    common = set.intersection(*({run.label for run in other.runs} for other in reports))
    if common:
        label = [run.label for run in reports[0].runs if run.label in common][-1]
        return next(run for run in report.runs if run.label == label)
    return max(report.runs, key=lambda run: run.output_throughput)


def _all_runs(runs: Sequence[Run]) -> list[DrawnRun]:
    brightest = 0.85  # the yellow end of viridis is invisible on white
    steps = max(len(runs) - 1, 1)
    return [
        DrawnRun(run.label, to_hex(colormaps["viridis"](brightest * index / steps)), run)
        for index, run in enumerate(runs)
    ]

"""Compares two reports: the ratio of each figure, and which report is better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from paged_backend.values.errors import ConfigError
from paged_loadtest.report import GOODPUT, THROUGHPUTS, hit_rate
from paged_loadtest.results import LATENCIES, Report, Run

SAME = 0.05  # ratios closer to 1 than this count as no difference

_HIGHER: dict[str, Callable[[Run], float | None]] = {
    **THROUGHPUTS,
    GOODPUT: lambda run: run.goodput,
    "Prefix-cache hit rate": hit_rate,
}
_STATISTICS = ("median", "p99")


@dataclass(frozen=True, slots=True)
class Line:
    """One figure in both reports."""

    name: str
    first: float
    second: float
    higher_is_better: bool

    @property
    def ratio(self) -> float | None:
        """The second value divided by the first; None if the first is 0."""
        return self.second / self.first if self.first else None

    @property
    def verdict(self) -> str:
        """Whether the second value is better or worse than the first, or the same."""
        ratio = self.ratio
        if ratio is None or abs(ratio - 1) < SAME:
            return "same"
        return "better" if (ratio > 1) == self.higher_is_better else "worse"


def compare(first: Report, second: Report) -> dict[str, list[Line]]:
    """Compare runs with equal labels; two reports of one run each are compared whatever the label.

    Raises:
        ConfigError: the reports have no run in common.
    """
    if len(first.runs) == len(second.runs) == 1:
        (one,), (other,) = first.runs, second.runs
        label = one.label if one.label == other.label else f"{one.label} | {other.label}"
        return {label: list(lines_of(one, other))}
    others = {run.label: run for run in second.runs}
    pairs = {
        run.label: list(lines_of(run, others[run.label]))
        for run in first.runs
        if run.label in others
    }
    if not pairs:
        labels = ["; ".join(run.label for run in report.runs) for report in (first, second)]
        raise ConfigError(f"the files have no run in common: {labels[0]} | {labels[1]}")
    return pairs


def differences(first: Report, second: Report) -> list[tuple[str, Any, Any]]:
    """Options and environment values that differ (except the date) and may explain the figures."""
    one, other = _settings(first), _settings(second)
    names = [*one, *(name for name in other if name not in one)]
    pairs = ((name, one.get(name), other.get(name)) for name in names)
    return [pair for pair in pairs if pair[1] != pair[2] and pair[0] != "date"]


def print_comparison(console: Console, first: Report, second: Report) -> None:
    """Print the differing settings, and a table for each run that both reports have.

    Raises:
        ConfigError: the reports have no run in common.
    """
    pairs = compare(first, second)
    different = differences(first, second)
    if different:
        console.print("Not the same in both:", highlight=False)
        for name, one, other in different:
            console.print(f"  {name}: {one} | {other}", markup=False, highlight=False)
    for label, lines in pairs.items():
        console.print(_table(label, lines))


def lines_of(one: Run, other: Run) -> Iterator[Line]:
    """Yield each figure that both runs have."""
    for name, value in _HIGHER.items():
        before, after = value(one), value(other)
        if before is not None and after is not None:
            yield Line(name, before, after, higher_is_better=True)
    for key in LATENCIES:
        if key in one.latencies and key in other.latencies:
            for statistic in _STATISTICS:
                before = getattr(one.latencies[key], statistic)
                after = getattr(other.latencies[key], statistic)
                yield Line(f"{key[:-3].upper()} {statistic} (ms)", before, after, False)


def _table(label: str, lines: list[Line]) -> Table:
    table = Table(title=label, title_justify="left")
    table.add_column("figure")
    for name in ("A", "B", "B / A"):
        table.add_column(name, justify="right")
    table.add_column("B is")
    colors = {"better": "green", "worse": "red", "same": "dim"}
    for line in lines:
        ratio = "-" if line.ratio is None else f"{line.ratio:.2f}"
        verdict = f"[{colors[line.verdict]}]{line.verdict}"
        table.add_row(line.name, f"{line.first:.2f}", f"{line.second:.2f}", ratio, verdict)
    return table


def _settings(report: Report) -> Mapping[str, Any]:
    return {"bench": report.kind, **report.config, **report.environment}

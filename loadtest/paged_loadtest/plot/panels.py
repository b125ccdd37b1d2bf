"""The panels of a plot, each drawn into its own axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import (
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullFormatter,
    PercentFormatter,
)

from paged_loadtest.plot.series import DrawnRun, Series
from paged_loadtest.report import hit_rate
from paged_loadtest.results import LATENCIES, Run

Draw: TypeAlias = Callable[[Axes, Sequence[Series]], None]

_QUANTILES = np.linspace(0, 1, 401)
_GREY = "#666666"
_OFFSETS = ((6, -13), (-16, 8), (8, 4), (-16, -13))  # distances of labels from data, in points
_WIDE = 1000  # max / min of a logarithmic axis that counts as wide


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot and its title, which is also its label for screen readers."""

    title: str
    draw: Draw


def panels(series: Sequence[Series]) -> list[Panel]:
    """Return the panels that the reports have data for."""
    against = "prefix-cache hits" if _is_about_hits(series) else "throughput"
    runs = [drawn.run for drawn in _drawn(series)]
    keys = [key for key in ("ttft_ms", "itl_ms") if any(run.samples.get(key) for run in runs)]
    names = {key: key[:-3].upper() for key in keys}
    chosen = [Panel(f"{names[key]} against {against}", partial(_draw_curve, key)) for key in keys]
    chosen += [
        Panel(f"Distribution of {names[key]}", partial(_draw_distribution, key)) for key in keys
    ]
    if any(run.server for run in runs):
        chosen += [
            Panel("KV cache in use over time", _draw_kv_use),
            Panel("Requests in the server over time", _draw_requests),
        ]
    return chosen


def _is_about_hits(series: Sequence[Series]) -> bool:
    return all(entry.report.kind == "prefix" for entry in series)


def _draw_curve(key: str, axes: Axes, series: Sequence[Series]) -> None:
    """Draw median and p99 of each run; the number next to a point is its concurrency."""
    about_hits = _is_about_hits(series)
    for index, entry in enumerate(series):
        runs = [run for run in entry.report.runs if key in run.latencies]
        x = [_position(run, about_hits) for run in runs]
        median = [run.latencies[key].median for run in runs]
        p99 = [run.latencies[key].p99 for run in runs]
        axes.plot(x, p99, "--o", color=entry.color, alpha=0.55, markersize=4)
        axes.plot(x, median, "-o", color=entry.color, markersize=6)
        if not about_hits:
            points = list(zip(x, median, strict=True))
            _name_points(axes, runs, points, entry.color, _OFFSETS[index % len(_OFFSETS)])
    axes.margins(x=0.08, y=0.12)
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis)
    axes.set_ylabel(f"{key[:-3].upper()} (ms)")
    if about_hits:
        axes.set_xlim(0, 100)
        axes.set_xlabel("prompt tokens from the prefix cache (%)")
    else:
        axes.set_xlim(left=0)
        axes.set_xlabel("output tokens per second")
    axes.legend(handles=_curve_legend(series, about_hits), loc="best")


def _position(run: Run, about_hits: bool) -> float:
    return 100 * (hit_rate(run) or 0.0) if about_hits else run.output_throughput


def _name_points(
    axes: Axes,
    runs: Sequence[Run],
    points: Sequence[tuple[float, float]],
    color: str,
    offset: tuple[int, int],
) -> None:
    for run, point in zip(runs, points, strict=True):
        if run.max_concurrency is not None:
            axes.annotate(
                str(run.max_concurrency),
                point,
                xytext=offset,
                textcoords="offset points",
                fontsize="small",
                color=color,
                path_effects=[withStroke(linewidth=3, foreground="white")],
            )


def _curve_legend(series: Sequence[Series], about_hits: bool) -> list[Line2D]:
    median = "median" if about_hits else "median (number: concurrency)"
    names = [Line2D([], [], color=s.color, marker="o", label=s.name) for s in series]
    styles = [
        Line2D([], [], color=_GREY, marker="o", label=median),
        Line2D([], [], color=_GREY, linestyle="--", label="p99"),
    ]
    return (names if len(series) > 1 else []) + styles


def _draw_distribution(key: str, axes: Axes, series: Sequence[Series]) -> None:
    """Draw the cumulative distribution, from which every percentile can be read."""
    for drawn in _drawn(series):
        samples = drawn.run.samples.get(key)
        if samples:
            values = np.quantile(samples, _QUANTILES)
            axes.plot(values, _QUANTILES, color=drawn.color, label=drawn.name)
    axes.set_xscale("log")
    _plain_numbers(axes.xaxis)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xlabel(f"{LATENCIES[key].lower()} (ms)")
    axes.set_ylabel("calls at most as long" if key == "ttft_ms" else "gaps at most as long")
    _runs_legend(axes)


def _draw_kv_use(axes: Axes, series: Sequence[Series]) -> None:
    for drawn in _drawn(series):
        times = [sample.at_s for sample in drawn.run.server]
        axes.plot(
            times, [s.kv_usage for s in drawn.run.server], color=drawn.color, label=drawn.name
        )
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("KV blocks in use")
    _runs_legend(axes)
    _time_axis(axes)


def _draw_requests(axes: Axes, series: Sequence[Series]) -> None:
    for drawn in _drawn(series):
        times = [sample.at_s for sample in drawn.run.server]
        axes.plot(times, [s.num_running for s in drawn.run.server], color=drawn.color)
        axes.plot(times, [s.num_waiting for s in drawn.run.server], "--", color=drawn.color)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("requests")
    styles = [Line2D([], [], color=_GREY, label="running")]
    styles.append(Line2D([], [], color=_GREY, linestyle="--", label="waiting"))
    axes.legend(handles=styles, loc="best")
    _time_axis(axes)


def _time_axis(axes: Axes) -> None:
    axes.set_xlabel("seconds since the beginning of the run")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _runs_legend(axes: Axes) -> None:
    """Draw the legend; a first word common to all runs becomes its title, to save space."""
    handles, labels = axes.get_legend_handles_labels()
    first = labels[0].partition(" ")[0]
    if len(labels) > 1 and all(label.startswith(f"{first} ") for label in labels):
        labels = [label.removeprefix(f"{first} ") for label in labels]
        axes.legend(handles, labels, title=first, loc="upper left", bbox_to_anchor=(1, 1))
    else:
        axes.legend(loc="best")


def _drawn(series: Sequence[Series]) -> list[DrawnRun]:
    return [drawn for entry in series for drawn in entry.drawn]


def _plain_numbers(axis: Axis) -> None:
    """Label with 1, 2, 5, 10, ... instead of powers of ten; with fewer on a wide axis."""
    low, high = axis.get_view_interval()
    is_wide = high > low * _WIDE
    axis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())

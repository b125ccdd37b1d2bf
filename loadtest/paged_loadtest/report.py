"""Prints runs as tables on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from rich import box
from rich.console import Console
from rich.table import Table

from paged_loadtest.results import LATENCIES, Run
from paged_loadtest.slo import Slo

THROUGHPUTS: dict[str, Callable[[Run], float]] = {
    "Request throughput (req/s)": lambda run: run.request_throughput,
    "Output token throughput (tok/s)": lambda run: run.output_throughput,
    "Total token throughput (tok/s)": lambda run: run.total_throughput,
}
GOODPUT = "Request goodput (req/s)"
_STATISTICS = ("mean", "median", "p90", "p99", "max")
_MIN_WIDTH = 100  # characters, if stdout is not a terminal


def make_console() -> Console:
    """Create a console for stdout, wide enough for all tables if stdout is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_MIN_WIDTH)


def print_run(console: Console, run: Run, slos: Sequence[Slo]) -> None:
    """Print all results of one run, in the order of ``vllm bench serve``."""
    totals = Table(show_header=False, title=f"{run.label}", title_justify="left")
    totals.add_column()
    totals.add_column(justify="right")
    for name, value in _totals(run, slos):
        totals.add_row(name, value)
    console.print(totals)
    if run.latencies:
        console.print(_latencies(run))
    for message, count in run.errors.items():
        console.print(f"{count} x {message}", style="red", markup=False, soft_wrap=True)


def print_series(console: Console, runs: Sequence[Run], first: str) -> None:
    """Print one line per run; run labels begin with ``first``; latencies are median and p99."""
    columns: dict[str, Callable[[Run], str]] = {
        "requests": lambda run: str(run.num_completed),
        "failed": lambda run: str(run.num_failed),
        "req/s": lambda run: _short(run.request_throughput),
        "output\ntok/s": lambda run: _short(run.output_throughput),
        "cached\nprompt": lambda run: percent(hit_rate(run)),
        "goodput\nreq/s": lambda run: "-" if run.goodput is None else _short(run.goodput),
    }
    columns |= {
        f"{key[:-3].upper()} ms\np50 / p99": partial(_median_and_p99, key) for key in LATENCIES
    }
    table = Table(box=box.SIMPLE_HEAD, padding=0)
    table.add_column(first, justify="right", no_wrap=True)
    shown = {name: [text(run) for run in runs] for name, text in columns.items()}
    if not any(run.num_failed for run in runs):
        del shown["failed"]
    shown = {name: cells for name, cells in shown.items() if set(cells) != {"-"}}
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for run, *cells in zip(runs, *shown.values(), strict=True):
        table.add_row(run.label.removeprefix(f"{first} "), *cells)
    console.print(table)


def hit_rate(run: Run) -> float | None:
    """The fraction of prompt tokens found in the server's prefix cache; None if unknown."""
    if run.num_cached_tokens is None or not run.num_input_tokens:
        return None
    return run.num_cached_tokens / run.num_input_tokens


def percent(part: float | None) -> str:
    """Format a fraction as a percentage; "-" for None."""
    return "-" if part is None else f"{100 * part:.1f}%"


def _totals(run: Run, slos: Sequence[Slo]) -> list[tuple[str, str]]:
    rows = [
        ("Successful requests", str(run.num_completed)),
        ("Failed requests", str(run.num_failed)),
        ("Maximum request concurrency", str(run.max_concurrency or "unlimited")),
        ("Request rate (req/s)", "inf" if run.request_rate is None else f"{run.request_rate:g}"),
        ("Benchmark duration (s)", f"{run.duration_s:.2f}"),
        ("Total input tokens", str(run.num_input_tokens)),
        ("Total output tokens", str(run.num_output_tokens)),
    ]
    if run.num_cached_tokens is not None:
        cached = f"{run.num_cached_tokens} ({percent(hit_rate(run))})"
        rows.append(("Input tokens from the prefix cache", cached))
    rows += [(name, f"{value(run):.2f}") for name, value in THROUGHPUTS.items()]
    if run.goodput is not None:
        kept = ", ".join(f"{slo.name} {slo.limit_ms:g} ms" for slo in slos)
        rows.append((f"{GOODPUT}, {kept}", f"{run.goodput:.2f}"))
    return rows


def _latencies(run: Run) -> Table:
    table = Table()
    table.add_column("Latency in ms")
    for name in _STATISTICS:
        table.add_column(name, justify="right")
    for name, words in LATENCIES.items():
        if name in run.latencies:
            values = [f"{getattr(run.latencies[name], s):.2f}" for s in _STATISTICS]
            table.add_row(f"{words.partition(' (')[0]}, {name[:-3].upper()}", *values)
    return table


def _median_and_p99(key: str, run: Run) -> str:
    latency = run.latencies.get(key)
    return "-" if latency is None else f"{_short(latency.median)} / {_short(latency.p99)}"


def _short(value: float) -> str:
    """Format with three significant digits, but at least all integer digits."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"

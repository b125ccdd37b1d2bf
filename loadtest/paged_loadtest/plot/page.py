"""One self-contained HTML file with all panels, results and settings."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from paged_loadtest.plot.panels import Panel, panels
from paged_loadtest.plot.series import Series
from paged_loadtest.plot.style import PANEL_INCHES, STYLE, circumstances, heading
from paged_loadtest.report import hit_rate, percent
from paged_loadtest.results import LATENCIES, Run

_CSS = """
:root { color: #1a1a1a; background: #fff; font: 15px/1.45 system-ui, sans-serif; }
body { max-width: 1400px; margin: 0 auto; padding: 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
p { margin: .15rem 0; color: #444; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 460px), 1fr));
  gap: 1.5rem; margin-top: 1.2rem; }
figure { margin: 0; }
svg { width: 100%; height: auto; display: block; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid #ddd; text-align: right;
  white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child { text-align: left; }
.settings { columns: 2 420px; }
.settings div { break-inside: avoid; display: flex; gap: .6rem; overflow-wrap: anywhere; }
.settings dt { flex: 0 0 11rem; color: #555; }
.settings dd { margin: 0; }
"""


def page(series: Sequence[Series]) -> str:
    """Return the content of the HTML file."""
    title = escape(heading(series))
    with matplotlib.rc_context(STYLE):
        figures = "\n".join(_figure(panel, series) for panel in panels(series))
    about = "\n".join(f"<p>{escape(text)}</p>" for text in circumstances(series))
    details = "\n".join(map(_details, series))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_CSS}</style>
</head>
<body>
<h1>{title}</h1>
{about}
<div class="panels">
{figures}
</div>
{details}
</body>
</html>
"""


def _figure(panel: Panel, series: Sequence[Series]) -> str:
    figure = Figure(figsize=PANEL_INCHES, layout="constrained")
    axes = figure.subplots()
    panel.draw(axes, series)
    axes.set_title(panel.title)
    content = io.StringIO()
    figure.savefig(content, format="svg", metadata={"Date": None})
    _, _, drawing = content.getvalue().partition("<svg")  # inline SVG has no XML header
    label = escape(panel.title, quote=True)
    return f'<figure role="img" aria-label="{label}">\n<svg{drawing}</figure>'


def _details(entry: Series) -> str:
    report = entry.report
    return "\n".join(
        [
            f"<h2>{escape(entry.name)}: runs</h2>",
            _runs(report.runs),
            f"<h2>{escape(entry.name)}: options and circumstances</h2>",
            _settings({**report.config, **report.environment}.items()),
        ]
    )


def _runs(runs: Sequence[Run]) -> str:
    heads = ["run", "requests", "failed", "req/s", "output tok/s", "prompt cached"]
    for key in LATENCIES:
        heads += [f"{key[:-3].upper()} ms {statistic}" for statistic in ("median", "p99")]
    rows = [_row("td", _cells(run)) for run in runs]
    head = _row("th", heads)
    return f'<div class="wide"><table>\n{head}\n{"".join(rows)}</table></div>'


def _cells(run: Run) -> list[str]:
    cells = [run.label, str(run.num_completed), str(run.num_failed)]
    cells += [f"{run.request_throughput:.2f}", f"{run.output_throughput:.1f}"]
    cells.append(percent(hit_rate(run)))
    for key in LATENCIES:
        latency = run.latencies.get(key)
        cells += ["-", "-"] if latency is None else [f"{latency.median:.2f}", f"{latency.p99:.2f}"]
    return cells


def _row(tag: str, cells: Iterable[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>\n"


def _settings(pairs: Iterable[tuple[str, Any]]) -> str:
    lines = [
        f"<div><dt>{escape(name)}</dt><dd>{escape(str(value))}</dd></div>"
        for name, value in pairs
        if value is not None and value != []
    ]
    return '<dl class="settings">' + "\n".join(lines) + "</dl>"

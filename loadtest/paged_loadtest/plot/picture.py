"""Draws all panels into one PNG."""

from __future__ import annotations

import io
import itertools
import textwrap
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from paged_loadtest.plot.panels import panels
from paged_loadtest.plot.series import Series
from paged_loadtest.plot.style import PANEL_INCHES, STYLE, circumstances, heading

_COLUMNS = 2
_DPI = 140
_LINE_LENGTH = 150  # characters across the image


def picture(series: Sequence[Series]) -> bytes:
    """Return the content of the PNG file."""
    chosen = panels(series)
    rows = -(-len(chosen) // _COLUMNS)
    width, height = PANEL_INCHES
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width * _COLUMNS, height * rows + 0.8), layout="constrained")
        figure.suptitle(_words(series), x=0.01, ha="left", fontsize=11.5)
        grid = figure.subplots(rows, _COLUMNS, squeeze=False)
        for axes, panel in itertools.zip_longest(grid.flat, chosen):
            if panel is None:
                axes.remove()
                continue
            panel.draw(axes, series)
            axes.set_title(panel.title)
        content = io.BytesIO()
        figure.savefig(content, format="png", dpi=_DPI)
    return content.getvalue()


def _words(series: Sequence[Series]) -> str:
    lines = [heading(series)]
    for text in circumstances(series):
        lines += textwrap.wrap(text, _LINE_LENGTH)
    return "\n".join(lines)

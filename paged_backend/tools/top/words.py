"""Formats numbers, curves and lines of text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.text import Text

from paged_backend.tools.scrape import Histogram

NOTHING = "-"
QUIET = "bright_black"
_LEVELS = "▁▂▃▄▅▆▇█"


def count(value: float | None) -> str:
    """Format as a whole number."""
    return NOTHING if value is None else f"{value:,.0f}"


def decimal(value: float | None) -> str:
    """Format with at least two digits."""
    if value is None:
        return NOTHING
    places = 0 if value >= 9.95 else 1 if value >= 0.995 else 2
    return f"{value:,.{places}f}"


def duration(seconds: float | None) -> str:
    """Format a time in seconds or milliseconds, with its unit."""
    if seconds is None:
        return NOTHING
    return f"{decimal(seconds)} s" if seconds >= 1 else f"{decimal(seconds * 1e3)} ms"


def percent(part: float | None) -> str:
    """Format a fraction of 1 as a percentage."""
    if part is None:
        return NOTHING
    return f"{part:.1%}" if 0 < part < 0.1 else f"{part:.0%}"


def quantile(histogram: Histogram | None, q: float) -> str:
    """Format the ``q`` quantile of observed times."""
    seconds = histogram.quantile(q) if histogram is not None else None
    if histogram is not None and seconds == math.inf:
        return f">{duration(histogram.bounds[-2])}"
    return duration(seconds)


def curve(values: Sequence[float], width: int) -> str:
    """Draw the last ``width`` values as columns; the highest one is full."""
    shown = values[-width:]
    top = max(shown, default=0.0)
    if top <= 0:
        return _LEVELS[0] * len(shown)
    return "".join(_LEVELS[round(value / top * (len(_LEVELS) - 1))] for value in shown)


def line(*parts: str | Text | tuple[str, str]) -> Text:
    """Join parts, some with a style, into one line that is cut at the edge of the screen."""
    return Text.assemble(*parts, no_wrap=True, overflow="ellipsis")

"""Lays out the screen for the size of the terminal."""

from __future__ import annotations

import time
from datetime import datetime

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.styled import Styled
from rich.text import Text

from paged_backend.tools.top.blocks import draw_blocks
from paged_backend.tools.top.numbers import draw_figures
from paged_backend.tools.top.options import TopOptions
from paged_backend.tools.top.watch import Frame
from paged_backend.tools.top.words import QUIET, line

MIN_WIDTH, MIN_HEIGHT = 70, 20


def draw(
    frame: Frame, options: TopOptions, width: int, height: int, hint: str = ""
) -> RenderableType:
    """Draw everything in at most ``height`` lines; ``hint`` names the available keys."""
    if width < MIN_WIDTH or height < MIN_HEIGHT:
        return Text(
            f"This terminal has {width} columns and {height} lines; top needs {MIN_WIDTH} and "
            f"{MIN_HEIGHT}."
        )
    head = _head(frame, options, hint)
    if frame.figures is None:
        return Group(*head, Text("" if frame.problem else "\nAsking the server ..."))
    figures, num_lines = draw_figures(frame.figures, width, height)
    body = Group(figures, _blocks(frame, width, height - len(head) - num_lines))
    return Group(*head, Styled(body, "dim") if frame.problem else body)


def _head(frame: Frame, options: TopOptions, hint: str) -> list[Text]:
    text = line(("paged-backend top", "bold"), f"  {options.model} at {options.url}  ")
    if frame.problem:
        seconds = time.monotonic() - frame.read_s
        since = "YET" if frame.figures is None else f"for {seconds:.0f} s"
        text.append(f"NO ANSWER {since}, trying on", "bold red")
        return [text, line((frame.problem, "red"))]
    if frame.figures is not None:
        is_up = frame.figures.is_up
        text.append("engine up" if is_up else "ENGINE DOWN", "green" if is_up else "bold red")
    return [text.append(f"  {datetime.now():%H:%M:%S}  {hint}", QUIET)]


def _blocks(frame: Frame, width: int, height: int) -> RenderableType:
    if frame.blocks is None:
        return Panel(Text(frame.why_no_blocks), title="KV blocks", title_align="left")
    return draw_blocks(frame.blocks, width, height)

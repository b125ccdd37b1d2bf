"""Keeps the screen of a terminal up to date."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from rich.console import Console, RenderableType
from rich.live import Live

from paged_backend.tools.top.keys import Keys
from paged_backend.tools.top.options import TopOptions
from paged_backend.tools.top.screen import draw
from paged_backend.tools.top.source import Source
from paged_backend.tools.top.watch import Frame, Watch
from paged_backend.values.errors import ConfigError

TICK_S = 0.1  # maximum delay before a key or a new size of the terminal takes effect
HINT = "q quits"


def print_once(options: TopOptions) -> None:
    """Print one frame; this queries the server twice, as rates need two readings.

    Raises:
        ConfigError: the server cannot be queried.
    """
    console = Console()
    with Source(options) as source:
        watch = Watch(source)
        watch.look()
        time.sleep(options.interval)
        console.print(_draw(watch.look(), options, console))


def show(options: TopOptions) -> None:
    """Show the server until ``q`` or Ctrl-C.

    Raises:
        ConfigError: stdout is not a terminal.
    """
    console = Console()
    if not console.is_terminal:
        raise ConfigError("top: stdout is not a terminal; --once prints one frame anywhere")
    with suppress(KeyboardInterrupt), ThreadPoolExecutor(1) as asking, Source(options) as source:
        watch = Watch(source)
        due_s = time.monotonic()
        frame, drawn = Frame(due_s), None
        answer: Future[Frame] | None = None
        with Keys() as keys, Live(console=console, screen=True, auto_refresh=False) as live:
            while "q" not in keys.wait(TICK_S):
                if answer is not None and answer.done():
                    frame, answer = answer.result(), None
                if answer is None and time.monotonic() >= due_s:
                    answer = asking.submit(watch.try_to_look)
                    due_s = max(due_s + options.interval, time.monotonic())
                if drawn != (frame, console.size):
                    drawn = (frame, console.size)
                    live.update(_draw(frame, options, console, HINT), refresh=True)


def _draw(frame: Frame, options: TopOptions, console: Console, hint: str = "") -> RenderableType:
    return draw(frame, options, console.width, console.height, hint)

"""Gathers what one frame of the screen shows."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from paged_client import EngineView

from paged_backend.tools.top.figures import Figures, Window
from paged_backend.tools.top.pool import Marks, Pool
from paged_backend.tools.top.source import Reading, Source
from paged_backend.values.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Blocks:
    """The engine's blocks and sequences; ``marks`` are the sequences' numbers, in order."""

    view: EngineView
    marks: tuple[int, ...]
    pool: Pool


@dataclass(frozen=True, slots=True, eq=False)  # each is a new one, whatever its values
class Frame:
    """The last successful reading; ``problem`` says why there is no newer one."""

    read_s: float  # time of that reading on the monotonic clock
    figures: Figures | None = None  # None until the server has answered once
    blocks: Blocks | None = None
    why_no_blocks: str = ""
    problem: str = ""


class Watch:
    """Queries a server repeatedly and keeps the state that rates and colors need."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._window = Window()
        self._marks = Marks()
        self._frame = Frame(time.monotonic())

    def look(self) -> Frame:
        """Query the server and return a new frame.

        Raises:
            ConfigError: the server cannot be queried.
        """
        reading = self._source.read()
        figures = self._window.add(reading)
        blocks = self._blocks(reading)
        self._frame = Frame(reading.at_s, figures, blocks, reading.why_no_view)
        return self._frame

    def try_to_look(self) -> Frame:
        """Query the server; if that fails, return the last frame with the problem."""
        try:
            return self.look()
        except ConfigError as error:
            return replace(self._frame, problem=str(error))

    def _blocks(self, reading: Reading) -> Blocks | None:
        if reading.view is None:
            return None
        marks = self._marks.of(reading.view.sequences)
        return Blocks(reading.view, marks, Pool(reading.view, marks))

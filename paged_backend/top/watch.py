"""What there is to show at a moment."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from paged_client import EngineView

from paged_backend.errors import ConfigError
from paged_backend.top.figures import Figures, Window
from paged_backend.top.pool import Marks, Pool
from paged_backend.top.source import Reading, Source


@dataclass(frozen=True, slots=True)
class Blocks:
    """The engine's blocks and sequences; ``marks`` are the sequences', in order."""

    view: EngineView
    marks: tuple[int, ...]
    pool: Pool


@dataclass(frozen=True, slots=True, eq=False)  # each is a new one, whatever it shows
class Frame:
    """The last good reading; ``problem`` says why there is no newer one."""

    read_s: float  # when that was, of the monotonic clock
    figures: Figures | None = None  # None until the server has answered once
    blocks: Blocks | None = None
    why_no_blocks: str = ""
    problem: str = ""


class Watch:
    """Looks at a server from time to time and remembers what it needs for rates and colors."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._window = Window()
        self._marks = Marks()
        self._frame = Frame(time.monotonic())

    def look(self) -> Frame:
        """What the server says now.

        Raises:
            ConfigError: it cannot be asked.
        """
        reading = self._source.read()
        figures = self._window.add(reading)
        blocks = self._blocks(reading)
        self._frame = Frame(reading.at_s, figures, blocks, reading.why_no_view)
        return self._frame

    def try_to_look(self) -> Frame:
        """What the server says now, or what it said last and why that is all."""
        try:
            return self.look()
        except ConfigError as error:
            return replace(self._frame, problem=str(error))

    def _blocks(self, reading: Reading) -> Blocks | None:
        if reading.view is None:
            return None
        marks = self._marks.of(reading.view.sequences)
        return Blocks(reading.view, marks, Pool(reading.view, marks))

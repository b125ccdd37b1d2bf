"""Shares the event loop among connections with received bytes that are much work."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Protocol


class TakesTurns(Protocol):
    """A connection with received bytes that wait to be processed."""

    def take_turn(self) -> None:
        """Process a limited amount; joins the turns again if there is more."""


class Turns:
    """Lets one connection take a turn in each iteration of the event loop.

    All connections together then delay other callbacks by one turn, not by one turn each.
    """

    def __init__(self) -> None:
        self._waiting: OrderedDict[TakesTurns, None] = OrderedDict()
        self._is_scheduled = False

    def __contains__(self, connection: TakesTurns) -> bool:
        return connection in self._waiting

    def join(self, connection: TakesTurns) -> None:
        """Add a connection at the end, unless it waits already."""
        self._waiting[connection] = None
        if not self._is_scheduled:
            self._schedule()

    def leave(self, connection: TakesTurns) -> None:
        """Remove a connection, if it waits."""
        self._waiting.pop(connection, None)

    def _schedule(self) -> None:
        self._is_scheduled = True
        asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_scheduled = False
        if not self._waiting:
            return
        connection, _ = self._waiting.popitem(last=False)
        try:
            connection.take_turn()
        finally:
            if self._waiting and not self._is_scheduled:
                self._schedule()

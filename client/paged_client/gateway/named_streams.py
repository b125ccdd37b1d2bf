"""Open streams by the names that clients gave them, so that other requests can end them."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from paged_client import AsyncStream

Name = tuple[str, str]
"""A tenant, and the id of a request; clients can end requests of their own tenant only."""


class NamedStreams:
    """The open streams of requests with names. Must be used inside one event loop."""

    def __init__(self) -> None:
        self._streams: defaultdict[Name, set[AsyncStream[Any]]] = defaultdict(set)
        self._aborting: set[asyncio.Task[None]] = set()

    @contextmanager
    def watching(self, name: Name | None, stream: AsyncStream[Any]) -> Iterator[None]:
        """Track a running stream, unless it has no name."""
        if name is None:
            yield
            return
        self._streams[name].add(stream)
        try:
            yield
        finally:
            self._streams[name].discard(stream)
            if not self._streams[name]:
                del self._streams[name]

    def abort(self, name: Name) -> None:
        """Begin to end all streams of a name."""
        for stream in self._streams.get(name, ()):
            task = asyncio.create_task(stream.abort())
            self._aborting.add(task)
            task.add_done_callback(self._aborting.discard)

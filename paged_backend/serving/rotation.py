"""Long work in slices, in turn, on a thread beside the one that serves everybody."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator

from paged_backend.values.errors import RequestRefused
from paged_backend.values.log import write_internal_error

Slices = Iterator[None]
"""Work of which each step is a slice."""

MAX_IDS_AT_ONCE = 2048  # tokens whose text is made at once, in up to 30 ms; more take turns
MAX_WAITING = 1024  # works that are open; more are refused


class Rotation:
    """A thread that does a slice of each group's first work in turn.

    The works of a group are done in their order.
    """

    def __init__(self, name: str) -> None:
        self._groups: dict[str, deque[Slices]] = {}  # the group that is next comes first
        self._num_open = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def has(self, group: str) -> bool:
        """Return True if works of a group are open, so that later ones must wait for them."""
        with self._changed:
            return group in self._groups

    def put(self, group: str, work: Slices) -> None:
        """Add a work at the end of its group.

        Raises:
            RequestRefused: too many works are open.
        """
        with self._changed:
            if self._num_open >= MAX_WAITING:
                raise RequestRefused(
                    "queue_full", f"{MAX_WAITING} long answers wait for their text; retry after 1 s"
                )
            self._groups.setdefault(group, deque()).append(work)
            self._num_open += 1
            self._changed.notify()

    def close(self) -> None:
        """Do what is open, and end the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while (found := self._next()) is not None:
            group, work = found
            try:
                next(work)
            except StopIteration:
                self._end(group)
            except BaseException as error:  # an internal error of one request
                write_internal_error(error)
                self._end(group)

    def _next(self) -> tuple[str, Slices] | None:
        """Wait for work, and move its group to the end; None once closed and nothing is open."""
        with self._changed:
            while not self._groups:
                if self._is_closed:
                    return None
                self._changed.wait()
            group = next(iter(self._groups))
            works = self._groups.pop(group)
            self._groups[group] = works
            return group, works[0]

    def _end(self, group: str) -> None:
        with self._changed:
            works = self._groups[group]
            works.popleft()
            self._num_open -= 1
            if not works:
                del self._groups[group]

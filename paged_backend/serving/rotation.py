"""Long work in slices, in turn, on another thread than the one that serves everybody."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from paged_backend.process.admission import PLACES_FOR_ONE_LEFT
from paged_backend.values.errors import RequestRefused
from paged_backend.values.log import write_internal_error

Slices = Iterator[None]
"""Work of which each step is a slice."""

MAX_IDS_AT_ONCE = 2048  # tokens with text that is made at once, in up to 30 ms; more take turns
MAX_CHARACTERS_AT_ONCE = 2**16  # text that is returned as it is; more takes turns
MAX_WAITING = 1024  # works that are open; more are refused


@dataclass(slots=True)
class _OpenWorks:
    """The works of a tenant that are open."""

    groups: dict[str, deque[Slices]] = field(default_factory=dict)  # the next one comes first
    num_open: int = 0


class Rotation:
    """A thread that does a slice of a work at a time.

    Tenants take turns, and in the turns of a tenant its groups do. The works of a group are done in
    their order.
    """

    def __init__(self, name: str) -> None:
        self._accounts: dict[str, _OpenWorks] = {}  # by tenant; the one that is next comes first
        self._num_open = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def has(self, tenant: str, group: str) -> bool:
        """Return True if works of a group are open, so that later ones must wait for them."""
        with self._changed:
            return tenant in self._accounts and group in self._accounts[tenant].groups

    def put(self, tenant: str, group: str, work: Slices) -> None:
        """Add a work at the end of its group.

        As in the queue of the engine, a tenant can fill about 8/9 of the places.

        Raises:
            RequestRefused: too many works are open, or too many of the tenant.
        """
        with self._changed:
            account = self._accounts.get(tenant) or _OpenWorks()
            num_free = MAX_WAITING - self._num_open
            if num_free <= 0:
                raise _full(f"{self._num_open} long answers")
            if account.num_open > PLACES_FOR_ONE_LEFT * num_free:
                raise _full(f"{account.num_open} long answers of this tenant")
            self._accounts[tenant] = account
            account.groups.setdefault(group, deque()).append(work)
            account.num_open += 1
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
            tenant, group, work = found
            try:
                next(work)
            except StopIteration:
                self._end(tenant, group)
            except BaseException as error:  # an internal error of one request
                write_internal_error(error)
                self._end(tenant, group)

    def _next(self) -> tuple[str, str, Slices] | None:
        """Wait for work, and take a turn of it; None once closed and nothing is open."""
        with self._changed:
            while not self._accounts:
                if self._is_closed:
                    return None
                self._changed.wait()
            tenant, account = _turn(self._accounts)
            group, works = _turn(account.groups)
            return tenant, group, works[0]

    def _end(self, tenant: str, group: str) -> None:
        with self._changed:
            account = self._accounts[tenant]
            works = account.groups[group]
            works.popleft()
            account.num_open -= 1
            self._num_open -= 1
            if not works:
                del account.groups[group]
            if not account.groups:
                del self._accounts[tenant]


_Entry = TypeVar("_Entry")


def _turn(entries: dict[str, _Entry]) -> tuple[str, _Entry]:
    """Return the first entry, and move it to the end."""
    name = next(iter(entries))
    entry = entries[name] = entries.pop(name)
    return name, entry


def _full(waiting: str) -> RequestRefused:
    return RequestRefused("queue_full", f"{waiting} wait for their text; retry after 1 s")

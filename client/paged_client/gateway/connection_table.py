"""Limits on open connections: in total and per address of a client."""

from __future__ import annotations

import ipaddress
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Protocol

from paged_client.gateway.errors import ApiError

_log = logging.getLogger("uvicorn.error")  # the logger that has a handler


class Evictable(Protocol):
    """A connection that can be closed to make room for another one."""

    def evict(self) -> None:
        """Close the connection at once."""


Order = OrderedDict[Evictable, None]


@dataclass
class _Address:
    """The connections of one address; those that wait for a request also in order of time."""

    number: int = 0
    waiting: Order = field(default_factory=OrderedDict)


class ConnectionTable:
    """All open connections, each of which either has a request in progress or waits for one.

    A new connection beyond a limit takes the place of the one that has waited longest, and is
    refused if all have requests in progress. The addresses of an IPv6 network of 64 bits count as
    one, because one client can use all of them.
    """

    def __init__(self, max_number: int, max_per_address: int | None = None) -> None:
        """Create the table.

        Args:
            max_number: limit on all connections.
            max_per_address: limit on the connections of each address; default: half of
                ``max_number``, without a limit for loopback addresses, from which a proxy on this
                machine forwards the requests of all clients.
        """
        self._max_number = max_number
        self._max_per_address = max_per_address or max(max_number // 2, 1)
        self._limits_loopback = max_per_address is not None
        self._homes: dict[Evictable, str] = {}
        self._addresses: dict[str, _Address] = {}
        self._waiting: Order = OrderedDict()

    def add(self, connection: Evictable, host: str) -> ApiError | None:
        """Add a new connection, and make room for it; its owner calls ``wait`` or ``begin`` then.

        Returns the refusal if there is no room. A refused connection is in the table, too, until
        it is closed, and is the first one that is evicted.
        """
        network, is_loopback = _network_of(host)
        address = self._addresses.setdefault(network, _Address())
        self._homes[connection] = network
        address.number += 1
        has_limit = self._limits_loopback or not is_loopback
        refusal = None
        if has_limit and address.number > self._max_per_address:
            if not self._evict(address.waiting, address.number - self._max_per_address):
                refusal = _refusal(429, "per address", self._max_per_address)
        elif len(self._homes) > self._max_number:
            if not self._evict(self._waiting, len(self._homes) - self._max_number):
                refusal = _refusal(503, "in all", self._max_number)
        if refusal is not None:
            self.wait(connection, is_closing=True)
        return refusal

    def wait(self, connection: Evictable, *, is_closing: bool = False) -> None:
        """Note that a connection has no request in progress from now on.

        With ``is_closing`` it is the first one to be evicted.
        """
        if connection not in self._homes or (connection in self._waiting and not is_closing):
            return
        for order in (self._waiting, self._addresses[self._homes[connection]].waiting):
            order[connection] = None
            if is_closing:
                order.move_to_end(connection, last=False)

    def begin(self, connection: Evictable) -> None:
        """Note that a connection has a request in progress, so that it cannot be evicted."""
        if self._waiting.pop(connection, self) is None:
            self._addresses[self._homes[connection]].waiting.pop(connection)

    def remove(self, connection: Evictable) -> None:
        """Remove a connection, if it is in the table."""
        self.begin(connection)
        network = self._homes.pop(connection, None)
        if network is None:
            return
        address = self._addresses[network]
        address.number -= 1
        if not address.number:
            del self._addresses[network]

    def _evict(self, waiting: Order, number: int) -> bool:
        """Close a number of waiting connections; returns whether there were that many."""
        evicted = list(islice(waiting, number))
        for connection in evicted:
            self.remove(connection)
            connection.evict()
        is_enough = len(evicted) == number
        what = "idle ones were closed for new ones" if is_enough else "new ones were refused"
        _log.warning("too many connections: %s", what)
        return is_enough


def _refusal(status: int, where: str, limit: int) -> ApiError:
    return ApiError(
        status,
        f"too many connections: at most {limit} {where}; retry after 1 s",
        code="too_many_connections",
        headers={"Retry-After": "1"},
    )


@lru_cache(1024)
def _network_of(host: str) -> tuple[str, bool]:
    """Return the name under which an address is counted, and whether it is loopback."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host, False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            network = ipaddress.ip_network((int(address) >> 64 << 64, 64))
            return str(network), address.is_loopback
        address = address.ipv4_mapped
    return str(address), address.is_loopback

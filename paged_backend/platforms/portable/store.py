"""The stores through which `torch.distributed` lets ranks find each other."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import (  # torch.distributed has them without their types
    PrefixStore,
    Store,
    TCPStore,
)

from paged_backend.models.division import Place, SharedValues


class SharedStore(Store):
    """Keeps the values that ranks tell each other over the connections that they have already.

    torch's own stores are a file, which several hosts do not share, or a port at which anybody may
    read and write. Torch keeps no reference to this object: the
    caller keeps one until the group is open.
    """

    def __init__(self, values: SharedValues) -> None:
        super().__init__()
        self._shared = values
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        """Keep a value, and tell it to the other ranks."""
        value = value.encode() if isinstance(value, str) else bytes(value)
        self._values[key] = value
        self._shared.publish(key, value)

    def get(self, key: str) -> bytes:
        """Return a value; waits until a rank has told it."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until ranks have told these values, as long as the connections wait."""
        while not self.check(keys):
            key, value = self._shared.next_value()
            self._values[key] = value

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether ranks have told these values."""
        return all(key in self._values for key in keys)


def open_tcp_store(values: SharedValues, place: Place, timeout_s: float) -> Store:
    """Return a store at a port of the first rank's host.

    NCCL connects some ranks only in a step, when nobody would pass on the values of a SharedStore.

    Args:
        values: values by which the ranks find the port.
        place: the place of this rank.
        timeout_s: how long a rank waits for a value.
    """
    key, timeout = "store", timedelta(seconds=timeout_s)
    store = SharedStore(values)
    if place.rank == 0:
        server = socket.create_server((place.host, 0), family=_family(place.host))
        port = server.getsockname()[1]
        tcp = TCPStore(
            place.host,
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )
        prefix = secrets.token_hex(16)
        store.set(key, f"{place.host} {port} {prefix}")
    else:
        host, port_text, prefix = store.get(key).decode().split()
        tcp = TCPStore(host, int(port_text), timeout=timeout, wait_for_workers=False)
    return PrefixStore(prefix, tcp)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET

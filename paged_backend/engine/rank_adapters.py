"""The LoRA adapters of a model that several ranks compute."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paged_backend.executor.base import AdapterStore, ReadAdapter
from paged_backend.executor.messages import (
    AdapterChange,
    DropAdapter,
    PutAdapter,
    encode_change,
)
from paged_backend.values.errors import ConfigError


class MessageSender(Protocol):
    """Sends a message to each other rank; see `OtherRanks`."""

    def send(self, message: bytes) -> None:
        """Send it; raises EngineDead if a node is gone."""
        ...


@dataclass(frozen=True, slots=True)
class _ReadFrom:
    """An adapter that was read, and its folder."""

    folder: Path
    adapter: ReadAdapter

    @property
    def digest(self) -> str:
        return self.adapter.digest


class RankAdapters:
    """The adapters of the first rank, which sends each change to the other ranks.

    The first rank reads an adapter on any thread. The others read it between two steps, from the
    same folder, and must find the same weights. See `AdapterStore`.

    Args:
        own: the adapters that this rank holds.
        others: the other ranks.
    """

    def __init__(self, own: AdapterStore, others: MessageSender) -> None:
        self._own = own
        self._others = others

    def read(self, folder: Path) -> ReadAdapter:
        """Read and check an adapter; see `AdapterStore.read`."""
        return _ReadFrom(folder, self._own.read(folder))

    def put(self, adapter: object) -> None:
        """Let all ranks hold an adapter that `read` has returned, from the next step on."""
        assert isinstance(adapter, _ReadFrom)
        self._others.send(encode_change(PutAdapter(str(adapter.folder), adapter.digest)))
        self._own.put(adapter.adapter)

    def drop(self, digest: str) -> None:
        """Let all ranks forget an adapter that no sequence has."""
        self._others.send(encode_change(DropAdapter(digest)))
        self._own.drop(digest)


def follow(store: AdapterStore | None, change: AdapterChange) -> None:
    """Change the adapters of a rank but the first as the first rank says.

    Raises:
        RuntimeError: the folder cannot be read here, or has other weights than on the first rank.
    """
    assert store is not None
    if isinstance(change, DropAdapter):
        store.drop(change.digest)
        return
    try:
        adapter = store.read(Path(change.folder))
    except ConfigError as error:
        raise RuntimeError(f"an adapter cannot be read: {error}") from error
    if adapter.digest != change.digest:
        raise RuntimeError(f"{change.folder} has other weights here than on rank 0")
    store.put(adapter)

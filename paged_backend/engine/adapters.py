"""The LoRA adapters that requests can name: which there are, and which of them are in memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from paged_backend.core.compiling import WAIT_S, Progress
from paged_backend.executor.base import AdapterStore, ReadAdapter
from paged_backend.values.errors import ConfigError, InvalidRequest
from paged_backend.values.lora import NOT_ENABLED, unsupported
from paged_backend.values.request import Request


class LoadingRequest(NamedTuple):
    """A request that waits for its adapter."""

    request: Request
    progress: Progress
    reading: Future[ReadAdapter]


class Adapters:
    """The adapters of an engine; only the engine's thread uses them.

    A name stands for the weights that its folder had when they were read last. Requests keep the
    weights with which they began, because adapters in use stay in memory.

    Args:
        store: holds the adapters in memory; None for an engine without adapters.
        max_in_memory: how many it holds.
        in_use: returns the digests of the adapters that unfinished requests have.
    """

    def __init__(
        self, store: AdapterStore | None, max_in_memory: int, in_use: Callable[[], set[str]]
    ) -> None:
        self._store = store
        self._max_in_memory = max_in_memory
        self._in_use = in_use
        self._folders: dict[str, Path] = {}  # by name
        self._digests: dict[str, str] = {}  # by name, of those that were read
        self._in_memory: OrderedDict[str, None] = OrderedDict()  # digests, last used at the end
        self._waiting: dict[str, LoadingRequest] = {}  # by request_id, in the order of arrival
        self._reading: dict[str, Future[ReadAdapter]] = {}  # by name
        self._reader = ThreadPoolExecutor(1, "adapters") if store is not None else None

    @property
    def folders(self) -> Mapping[str, Path]:
        """The folders of all adapters, by name."""
        return self._folders

    def load(self, name: str, folder: Path) -> None:
        """Read an adapter, and let requests name it; it replaces another one of the same name.

        Raises:
            ConfigError: the adapter cannot be used; another one of this name remains.
            InvalidRequest: the engine has no adapters.
        """
        adapter = self._enabled.read(folder)
        self.unload(name)
        self._folders[name] = folder
        if self._place(adapter):  # otherwise it is read again when there is room
            self._digests[name] = adapter.digest

    def unload(self, name: str) -> None:
        """Let no more requests name an adapter; unknown names are ignored."""
        self._folders.pop(name, None)
        self._digests.pop(name, None)
        self._reading.pop(name, None)

    def resolve(self, request: Request, progress: Progress) -> Request | None:
        """Return a request with the digest of its adapter; None if it must wait for it.

        Raises:
            InvalidRequest: there is no such adapter.
        """
        name = request.lora_name
        if not name:
            return request
        store = self._enabled
        if name not in self._folders:
            raise InvalidRequest.verbatim("lora_name", unsupported(name, list(self._folders)))
        digest = self._digests.get(name)
        if digest is not None and digest in self._in_memory:
            self._in_memory.move_to_end(digest)
            return replace(request, adapter=digest)
        reading = self._reading.get(name)
        if reading is None:
            assert self._reader is not None
            reading = self._reading[name] = self._reader.submit(store.read, self._folders[name])
        self._waiting[request.request_id] = LoadingRequest(request, progress, reading)
        return None

    def take_ready(self, *, wait: bool) -> list[tuple[LoadingRequest, Request | str]]:
        """Remove and return the requests with adapters that are in memory, or cannot be.

        Args:
            wait: wait for one, but not for long: other messages may arrive.

        Returns:
            Each with the request that has its adapter, or with the problem.
        """
        if not self._waiting:
            return []
        if wait:
            futures = [waiting.reading for waiting in self._waiting.values()]
            wait_for(futures, timeout=WAIT_S, return_when=FIRST_COMPLETED)
        ready: list[tuple[LoadingRequest, Request | str]] = []
        starting: set[str] = set()
        for waiting in list(self._waiting.values()):
            if not waiting.reading.done():
                continue
            error, request = waiting.reading.exception(), waiting.request
            name = request.lora_name
            if isinstance(error, ConfigError):
                ready.append((waiting, f"lora_name: {error}"))
            elif self._place(adapter := waiting.reading.result(), starting):
                starting.add(adapter.digest)
                ready.append((waiting, replace(request, adapter=adapter.digest)))
                if self._reading.get(name) is waiting.reading:  # it was not replaced meanwhile
                    self._digests[name] = adapter.digest
            else:
                break  # adapters get room in the order of arrival, so that each does in the end
            if self._reading.get(name) is waiting.reading:
                del self._reading[name]
            del self._waiting[request.request_id]
        return ready

    def pop(self, request_id: str) -> LoadingRequest | None:
        """Remove a request that waits for its adapter; returns None for an unknown id."""
        return self._waiting.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    @property
    def _enabled(self) -> AdapterStore:
        if self._store is None:
            raise InvalidRequest.verbatim("lora_name", NOT_ENABLED)
        return self._store

    def _place(self, adapter: ReadAdapter, also_in_use: Set[str] = frozenset()) -> bool:
        """Let the store hold an adapter; returns False if all that it holds are in use."""
        store, digest = self._enabled, adapter.digest
        if digest in self._in_memory:
            self._in_memory.move_to_end(digest)
            return True
        if len(self._in_memory) == self._max_in_memory:
            used = self._in_use() | also_in_use
            unused = next((other for other in self._in_memory if other not in used), None)
            if unused is None:
                return False
            del self._in_memory[unused]
            store.drop(unused)
        store.put(adapter)
        self._in_memory[digest] = None
        return True

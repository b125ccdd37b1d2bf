"""The LoRA adapters of an engine: which of them are in memory, and how others are read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from paged_backend.checkpoint.peft import check_inside
from paged_backend.core.compiling import WAIT_S, Progress
from paged_backend.engine.reading_thread import ReadingThread
from paged_backend.executor.base import AdapterStore, ReadAdapter
from paged_backend.values.errors import ConfigError, InvalidRequest
from paged_backend.values.lora import NOT_ENABLED, LoRARequest
from paged_backend.values.request import Request

_MAX_UNLOADED = 2**16  # adapters that are remembered after they were unloaded


class LoadingRequest(NamedTuple):
    """A request that waits for its adapter."""

    request: Request
    progress: Progress
    reading: Future[ReadAdapter]


class LoadedAdapter(NamedTuple):
    """The end of `Adapters.start_loading`; ``problem`` is empty if the adapter can be used."""

    load_id: str
    problem: str


class Adapters:
    """The adapters of an engine; only the engine's thread uses them.

    An adapter stands for the weights that its folder had when they were read last. Requests keep
    the weights with which they began, because adapters in use stay in memory.

    Args:
        store: holds the adapters in memory; None for an engine without adapters.
        max_in_memory: how many it holds.
        in_use: returns the digests of the adapters that unfinished requests have.
        exchange: exchanges messages with other ranks, on which the end of a reading may depend.
        runtime_folder: the folder that has the adapters that `load` has not read; None for none.
    """

    def __init__(
        self,
        store: AdapterStore | None,
        max_in_memory: int,
        in_use: Callable[[], set[str]],
        exchange: Callable[[], None],
        runtime_folder: Path | None = None,
    ) -> None:
        self._store = store
        self._max_in_memory = max_in_memory
        self._in_use = in_use
        self._exchange = exchange
        self._folders = [] if runtime_folder is None else [runtime_folder]
        self._own: set[LoRARequest] = set()  # `load` has read them
        self._unloaded: dict[LoRARequest, None] = {}  # no new request can have them
        self._digests: dict[LoRARequest, str] = {}  # digests of those in memory
        self._in_memory: OrderedDict[str, None] = OrderedDict()  # digests, last used at the end
        self._waiting: dict[str, LoadingRequest] = {}  # by request_id, in the order of arrival
        self._loading: dict[str, LoRARequest] = {}  # by load_id
        self._reading: dict[LoRARequest, Future[ReadAdapter]] = {}
        self._reader = ReadingThread() if store is not None else None

    # --- adapters -------------------------------------------------------------------------

    def allow_folder(self, folder: Path) -> None:
        """Let another folder have adapters that `load` has not read, too."""
        self._folders.append(folder)

    def load(self, lora: LoRARequest) -> None:
        """Read an adapter from any folder now, unless it is in memory.

        Raises:
            ConfigError: the adapter cannot be used.
            InvalidRequest: the engine has no adapters.
        """
        if lora in self._digests:
            return
        store = self._enabled
        assert self._reader is not None
        reading = self._reader.submit(partial(_read, store, Path(lora.lora_path)))
        while not reading.done():
            self._exchange()
            wait_for([reading], WAIT_S)
        adapter = reading.result()
        self._own.add(lora)
        self._unloaded.pop(lora, None)
        self._place(lora, adapter)  # otherwise it is read again when there is room

    def start_loading(self, load_id: str, lora: LoRARequest) -> None:
        """Read an adapter of the runtime folder on another thread, for `take_loaded`.

        Raises:
            InvalidRequest: the engine has no adapters.
        """
        self._read(lora)
        self._loading[load_id] = lora
        self._unloaded.pop(lora, None)

    def take_loaded(self) -> list[LoadedAdapter]:
        """Remove and return the ends of `start_loading` since the last call."""
        loaded: list[LoadedAdapter] = []
        for load_id, lora in list(self._loading.items()):
            reading = self._reading.get(lora)
            if reading is not None and not reading.done():
                continue
            problem = ""
            if reading is not None:
                error = reading.exception()
                if isinstance(error, ConfigError):
                    problem = str(error)
                else:
                    self._place(lora, reading.result())
            loaded.append(LoadedAdapter(load_id, problem))
            del self._loading[load_id]
        if loaded:
            self._drop_readings()
        return loaded

    def forget(self, lora: LoRARequest, *, is_replaced: bool = False) -> None:
        """Let an adapter leave the memory if nothing uses its weights any more.

        Args:
            lora: the adapter.
            is_replaced: whether its name stands for another adapter now. If not, `resolve` refuses
                new requests that have it.
        """
        if not is_replaced:
            self._unloaded[lora] = None
            if len(self._unloaded) > _MAX_UNLOADED:
                del self._unloaded[next(iter(self._unloaded))]
        self._own.discard(lora)
        self._reading.pop(lora, None)
        digest = self._digests.pop(lora, None)
        if digest is None or digest in self._digests.values() or digest in self._in_use():
            return
        del self._in_memory[digest]
        self._enabled.drop(digest)

    # --- requests -------------------------------------------------------------------------

    def resolve(self, request: Request, progress: Progress) -> Request | None:
        """Return a request with the digest of its adapter; None if it must wait for it.

        Raises:
            InvalidRequest: the engine has no adapters, or a new request has one that was unloaded.
        """
        lora = request.lora
        if lora is None:
            return request
        if lora in self._unloaded and not progress:
            problem = "it was unloaded before the request began"
            raise InvalidRequest.verbatim(
                "lora_name", f"LoRA {lora.lora_name} is not supported: {problem}"
            )
        digest = self._digests.get(lora)
        if digest is not None:
            self._in_memory.move_to_end(digest)
            return replace(request, adapter=digest)
        self._waiting[request.request_id] = LoadingRequest(request, progress, self._read(lora))
        return None

    def take_ready(self, *, wait: bool) -> list[tuple[LoadingRequest, Request | str]]:
        """Remove and return the requests with adapters that are in memory, or cannot be.

        Args:
            wait: wait for one, but not for long: other messages may arrive.

        Returns:
            Each with the request that has its adapter, or with the problem.
        """
        if wait and self:
            readings = [waiting.reading for waiting in self._waiting.values()]
            wait_for([*readings, *self._reading.values()], WAIT_S, return_when=FIRST_COMPLETED)
        ready: list[tuple[LoadingRequest, Request | str]] = []
        starting: set[str] = set()
        for waiting in list(self._waiting.values()):
            if not waiting.reading.done():
                continue
            error, request = waiting.reading.exception(), waiting.request
            assert request.lora is not None
            if isinstance(error, ConfigError):
                ready.append((waiting, f"lora_name: {error}"))
            elif self._place(request.lora, adapter := waiting.reading.result(), starting):
                starting.add(adapter.digest)
                ready.append((waiting, replace(request, adapter=adapter.digest)))
            else:
                break  # adapters get room in the order of arrival, so that each does in the end
            del self._waiting[request.request_id]
        if ready:
            self._drop_readings()
        return ready

    def pop(self, request_id: str) -> LoadingRequest | None:
        """Remove a request that waits for its adapter; returns None for an unknown id."""
        waiting = self._waiting.pop(request_id, None)
        if waiting is not None:
            self._drop_readings()
        return waiting

    @property
    def waiting_names(self) -> set[str]:
        """The names of the adapters that requests wait for."""
        loras = (waiting.request.lora for waiting in self._waiting.values())
        return {lora.lora_name for lora in loras if lora is not None}

    def __len__(self) -> int:
        """Return the number of requests and loads that wait for an adapter."""
        return len(self._waiting) + len(self._loading)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    # --- memory ---------------------------------------------------------------------------

    @property
    def _enabled(self) -> AdapterStore:
        if self._store is None:
            raise InvalidRequest.verbatim("lora_name", NOT_ENABLED)
        return self._store

    def _read(self, lora: LoRARequest) -> Future[ReadAdapter]:
        """Start to read an adapter, unless it is being read."""
        store, own, reading = self._enabled, lora in self._own, self._reading.get(lora)
        if reading is None:
            assert self._reader is not None
            folder = Path(lora.lora_path)
            if own:
                reading = self._reader.submit(partial(_read, store, folder))
            else:
                folders = tuple(self._folders)
                reading = self._reader.submit(partial(_read_inside, store, folder, folders))
            self._reading[lora] = reading
        return reading

    def _drop_readings(self) -> None:
        """Forget the weights that were read for requests that have ended."""
        wanted = {waiting.request.lora for waiting in self._waiting.values()}
        wanted.update(self._loading.values())
        self._reading = {lora: read for lora, read in self._reading.items() if lora in wanted}

    def _place(
        self, lora: LoRARequest, adapter: ReadAdapter, also_in_use: Set[str] = frozenset()
    ) -> bool:
        """Let the store hold an adapter; returns False if all that it holds are in use."""
        store, digest = self._enabled, adapter.digest
        if digest in self._in_memory:
            self._in_memory.move_to_end(digest)
        else:
            if len(self._in_memory) == self._max_in_memory:
                used = self._in_use() | also_in_use
                unused = next((other for other in self._in_memory if other not in used), None)
                if unused is None:
                    return False
                self._evict(unused)
            store.put(adapter)
            self._in_memory[digest] = None
        self._digests[lora] = digest
        return True

    def _evict(self, digest: str) -> None:
        del self._in_memory[digest]
        for lora in [lora for lora, other in self._digests.items() if other == digest]:
            del self._digests[lora]
        self._enabled.drop(digest)


def _read_inside(store: AdapterStore, folder: Path, roots: Sequence[Path]) -> ReadAdapter:
    """Read an adapter that a client has named, if it is in a folder for such adapters."""
    problem = ConfigError(f"{folder} cannot be read: runtime_lora_folder is not set")
    for root in roots:
        try:
            inside = check_inside(root, folder)
        except ConfigError as error:
            problem = error
        else:
            return _read(store, inside)
    raise problem


def _read(store: AdapterStore, folder: Path) -> ReadAdapter:
    try:
        return store.read(folder)
    except ConfigError:
        raise
    except Exception as error:  # no adapter may end the engine
        raise ConfigError(f"{folder} cannot be read: {type(error).__name__}") from error

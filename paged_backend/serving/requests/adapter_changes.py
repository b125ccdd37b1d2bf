"""Loads and unloads LoRA adapters while the model serves, on behalf of clients."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from paged_backend.process import wire
from paged_backend.process.adapter_names import AdapterNames, Brought
from paged_backend.process.engines import Engines
from paged_backend.serving.contract import Array
from paged_backend.serving.requests.parameters import take_lora_name
from paged_backend.values.errors import InvalidRequest, RequestRefused, as_exception
from paged_backend.values.log import LOG
from paged_backend.values.lora import LoRARequest
from paged_backend.values.validation import shorten

OFF = "cannot be loaded or unloaded: the option runtime_lora_folder is not set"
MAX_OPEN = 256  # changes of one front end that have not ended
_MAX_PATH_LENGTH = 4096  # characters
_MAX_SHOWN = 64  # characters of a name in an error


class Caller(Protocol):
    """Is told how a change ends, which must not take long: a client, or what goes on then."""

    def send(self, tensors: dict[str, Array], final: bool) -> None:
        """Take note that the change was carried out."""

    def fail(self, error: Exception) -> None:
        """Take note that it was not."""


class _Nobody:
    """Does not wait for the end of a change."""

    def send(self, tensors: dict[str, Array], final: bool) -> None:
        """See `Caller`."""

    def fail(self, error: Exception) -> None:
        """See `Caller`."""


@dataclass(slots=True)
class _Change:
    """A change that engines carry out."""

    message: wire.LoadAdapter | wire.DropAdapter
    sender: Caller
    in_place: bool = False
    brought: Brought | None = None  # what the request has brought that the load is for
    engines: set[int] = field(default_factory=set)  # those that have not confirmed it
    is_confirmed: bool = False  # by one engine at least


class AdapterChanges:
    """The loads and unloads of one front end that have not ended; any thread may use it.

    A load ends when all engines have checked the adapter, and an unload when no request has the
    adapter any more. Engines that end meanwhile are asked again when they are back.

    Args:
        link: the engines.
        names: the adapters that requests can name.
        is_on: whether clients may load and unload adapters.
        is_used: returns whether an open request of this front end has an adapter.
        max_brought_bytes: limit of the adapters that requests have brought.
    """

    def __init__(
        self,
        link: Engines,
        names: AdapterNames,
        *,
        is_on: bool,
        is_used: Callable[[LoRARequest], bool],
        max_brought_bytes: int = 0,
    ) -> None:
        self._link = link
        self._names = names
        self._is_on = is_on
        self._is_used = is_used
        self._max_brought_bytes = max_brought_bytes
        self._open: dict[str, _Change] = {}  # by change_id
        self._lock = threading.RLock()

    def __len__(self) -> int:
        """Return the number of changes that have not ended."""
        return len(self._open)

    def load(self, parameters: Mapping[str, Any], sender: Caller) -> None:
        """Begin to load an adapter: ``lora_name``, ``lora_path`` and ``load_inplace``.

        Raises:
            InvalidRequest: a parameter cannot be used.
        """
        values = dict(parameters)
        name = self._name(values)
        path, in_place = values.pop("lora_path", None), values.pop("load_inplace", False)
        _refuse_others(values)
        if not isinstance(path, str) or not 0 < len(path) <= _MAX_PATH_LENGTH:
            raise InvalidRequest(
                "lora_path", f"must be a string of 1 to {_MAX_PATH_LENGTH} characters"
            )
        if not isinstance(in_place, bool):
            raise InvalidRequest("load_inplace", "must be true or false")
        lora = self._names.prepare(name, path, in_place=in_place)
        self._begin(_Change(wire.LoadAdapter(uuid.uuid4().hex, lora), sender, in_place))

    def bring(self, name: str, path: str, brought: Brought, sender: Caller) -> None:
        """Begin to load an adapter that a request has brought.

        The oldest of such adapters are unloaded if they have too many bytes together.

        Raises:
            InvalidRequest: the name stands for an adapter already.
            RequestRefused: too many changes are open.
        """
        self._check_room()
        lora = self._names.prepare(name, path, in_place=False, is_brought=True)
        message = wire.LoadAdapter(uuid.uuid4().hex, lora)
        self._begin(_Change(message, sender, brought=brought))

    def unload(self, parameters: Mapping[str, Any], sender: Caller) -> None:
        """Let no more requests name the adapter ``lora_name``, and begin to unload it.

        Raises:
            InvalidRequest: a parameter cannot be used.
        """
        values = dict(parameters)
        name = self._name(values)
        _refuse_others(values)
        lora = self._names.remove(name)
        LOG.info("adapter %s is unloaded", name)
        self._begin(_Change(wire.DropAdapter(uuid.uuid4().hex, lora), sender))

    def confirm(self, engine: int, change: wire.AdapterChanged) -> None:
        """Note that an engine has carried out a change, or cannot."""
        with self._lock:
            found = self._open.get(change.change_id)
            if found is None:
                return
            if change.problem:
                del self._open[change.change_id]
                self._names.delete_files(found.message.lora)
                _fail(found.sender, InvalidRequest.verbatim("lora_path", change.problem))
                return
            found.is_confirmed = True
            found.engines.discard(engine)
        self.end_done()

    def lose_engine(self, engine: int) -> None:
        """Note that an engine has ended."""
        with self._lock:
            for change in self._open.values():
                change.engines.discard(engine)

    def add_engine(self, engine: int) -> None:
        """Ask a new engine for all open changes."""
        with self._lock:
            for change in self._open.values():
                if self._link.send(change.message, engine):
                    change.engines.add(engine)

    def end_done(self) -> None:
        """Answer the changes that are done."""
        with self._lock:
            for change_id, change in list(self._open.items()):
                if not change.is_confirmed or change.engines:
                    continue
                match change.message:
                    case wire.LoadAdapter(_, lora):
                        del self._open[change_id]
                        self._end_load(lora, change)
                    case wire.DropAdapter(_, lora):
                        if not self._is_used(lora):
                            del self._open[change_id]
                            self._names.delete_files(lora)
                            _succeed(change.sender)

    def fail_all(self, error: Exception) -> None:
        """End all changes with an error."""
        with self._lock:
            changes, self._open = list(self._open.values()), {}
        for change in changes:
            _fail(change.sender, error)

    def _end_load(self, lora: LoRARequest, change: _Change) -> None:
        brought = change.brought
        try:
            if brought is not None and self._names.was_brought(lora.lora_name, brought.digest):
                self._drop(lora, is_replaced=True)  # another request has brought the same one
                _succeed(change.sender)
                return
            replaced = self._names.add(lora, in_place=change.in_place, brought=brought)
        except Exception as error:  # another load was first, or the file cannot be written
            self._drop(lora, is_replaced=True)
            _fail(change.sender, as_exception(error))
            return
        LOG.info("adapter %s is loaded from %s", lora.lora_name, shorten(lora.lora_path))
        if replaced is not None:
            self._drop(replaced, is_replaced=True)
        if brought is not None:
            for oldest in self._names.take_oldest(self._max_brought_bytes):
                LOG.info("adapter %s makes room for another one", oldest.lora_name)
                self._drop(oldest)
        _succeed(change.sender)

    def _drop(self, lora: LoRARequest, *, is_replaced: bool = False) -> None:
        """Let engines forget an adapter after its requests have ended, without waiting for that."""
        message = wire.DropAdapter(uuid.uuid4().hex, lora, is_replaced)
        self._begin(_Change(message, _Nobody()))

    def _begin(self, change: _Change) -> None:
        with self._lock:
            self._open[change.message.change_id] = change
            for engine in range(self._link.size):
                if self._link.send(change.message, engine):
                    change.engines.add(engine)

    def _check_room(self) -> None:
        if len(self._open) >= MAX_OPEN:
            raise RequestRefused("queue_full", f"{MAX_OPEN} adapters are changed; retry after 1 s")

    def _name(self, values: dict[str, Any]) -> str:
        """Remove the name of the adapter from the parameters of a change that is allowed."""
        if not self._is_on:
            raise InvalidRequest("lora_name", OFF)
        self._check_room()
        name = take_lora_name(values)
        if not name:
            raise InvalidRequest("lora_name", "is missing")
        return name


def _refuse_others(values: Mapping[str, Any]) -> None:
    for name in values:
        raise InvalidRequest(name[:_MAX_SHOWN], "is not known for adapters")


def _succeed(sender: Caller) -> None:
    with contextlib.suppress(Exception):  # the server may have ended the request already
        sender.send({}, True)


def _fail(sender: Caller, error: Exception) -> None:
    with contextlib.suppress(Exception):
        sender.fail(error)

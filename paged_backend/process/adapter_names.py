"""The names of the LoRA adapters of one model, which all its front ends share.

The adapters that clients have loaded are in a file in the private folder of the model's first
engine, and the weights that requests have brought are in folders beside it. They outlive engines,
and end with the last front end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from paged_backend.process.lifetime import exclusive
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import LoRARequest, numbered, unsupported

FILE = "adapters.json"
BROUGHT = "adapters"
"""The folder with the adapters that requests have brought."""
MAX_RUNTIME_ADAPTERS, MAX_BROUGHT = 4096, 1024
"""Adapters that were loaded from folders, and those that requests have brought."""


class Brought(msgspec.Struct, frozen=True):
    """What a request has brought: the size and the digest of the arrays of an adapter."""

    num_bytes: int
    digest: str


class _Loaded(msgspec.Struct, frozen=True):
    """The content of the file."""

    last_id: int = 0
    adapters: dict[str, LoRARequest] = {}
    brought: dict[str, Brought] = {}  # those of `adapters` that came with requests, oldest first


class AdapterNames:
    """The adapters that requests can name; any thread may use it.

    Args:
        folder: the private folder of the model's first engine.
        modules: the option ``lora_modules``, with the adapters that clients cannot change.
    """

    def __init__(self, folder: Path, modules: Mapping[str, str] | None) -> None:
        self._file = folder / FILE
        self.brought_folder = folder / BROUGHT
        self._fixed = numbered(modules or {})
        self._version: tuple[int, int] | None = None  # state of the file that was read
        self._loaded = _Loaded()

    @property
    def known(self) -> dict[str, LoRARequest]:
        """The adapters of the options, then those from folders, by their names.

        Adapters that requests have brought are left out.
        """
        loaded = self._read()
        others = {
            name: lora for name, lora in loaded.adapters.items() if name not in loaded.brought
        }
        return {**self._fixed, **others}

    def find(self, name: str) -> LoRARequest:
        """Return the adapter of a name.

        Raises:
            InvalidRequest: there is none.
        """
        lora = self._fixed.get(name) or self._read().adapters.get(name)
        if lora is None:
            raise InvalidRequest.verbatim("lora_name", unsupported(name, self.known))
        return lora

    def prepare(
        self, name: str, path: str, *, in_place: bool, is_brought: bool = False
    ) -> LoRARequest:
        """Return an adapter with a new number, which `add` can add once engines have checked it.

        Args:
            name: the name by which requests will know it.
            path: its folder.
            in_place: whether it may replace another one.
            is_brought: whether a request has brought it; others make room for it.

        Raises:
            InvalidRequest: there is no place for it, or the name cannot be used.
        """
        with self._changing() as loaded:
            self._check_free(loaded, name, in_place=in_place)
            num_loaded = len(loaded.adapters) - len(loaded.brought)
            if num_loaded >= MAX_RUNTIME_ADAPTERS and not is_brought:
                raise InvalidRequest(
                    "lora_name", f"cannot be added: {MAX_RUNTIME_ADAPTERS} adapters are loaded"
                )
            number = max(loaded.last_id, len(self._fixed)) + 1
            self._write(_Loaded(number, loaded.adapters, loaded.brought))
        return LoRARequest(name, number, path)

    def add(
        self, lora: LoRARequest, *, in_place: bool, brought: Brought | None = None
    ) -> LoRARequest | None:
        """Let requests name an adapter; returns the one that it replaces, if any.

        Args:
            lora: the adapter.
            in_place: whether it may replace another one.
            brought: what a request has brought; None if the adapter was loaded from a folder.

        Raises:
            InvalidRequest: another one of this name was added meanwhile.
        """
        name = lora.lora_name
        with self._changing() as loaded:
            self._check_free(loaded, name, in_place=in_place)
            others = {other: found for other, found in loaded.brought.items() if other != name}
            if brought is not None:
                others[name] = brought
            self._write(_Loaded(loaded.last_id, {**loaded.adapters, name: lora}, others))
            return loaded.adapters.get(name)

    def was_brought(self, name: str, digest: str) -> bool:
        """Return True if requests can name an adapter that was brought with these weights.

        Raises:
            InvalidRequest: the name stands for another adapter.
        """
        self._check_not_fixed(name)
        loaded = self._read()
        found = loaded.brought.get(name)
        if name in loaded.adapters and (found is None or found.digest != digest):
            raise InvalidRequest(
                "lora_name", f"{name} stands for another adapter; send the weights for another one"
            )
        return found is not None

    def take_oldest(self, max_bytes: int) -> list[LoRARequest]:
        """Remove and return the oldest of the brought adapters, until the others are few enough.

        Args:
            max_bytes: limit of their bytes. Their number is limited by `MAX_BROUGHT`.
        """
        with self._changing() as loaded:
            adapters, brought = dict(loaded.adapters), dict(loaded.brought)
            num_bytes = sum(found.num_bytes for found in brought.values())
            taken: list[LoRARequest] = []
            for name, found in loaded.brought.items():
                if num_bytes > max_bytes or len(brought) > MAX_BROUGHT:
                    taken.append(adapters.pop(name))
                    del brought[name]
                    num_bytes -= found.num_bytes
            if taken:
                self._write(_Loaded(loaded.last_id, adapters, brought))
            return taken

    def delete_files(self, lora: LoRARequest) -> None:
        """Delete the folder of an adapter that no request has, if a request has brought it."""
        folder = Path(lora.lora_path)
        if folder.parent == self.brought_folder:
            shutil.rmtree(folder, ignore_errors=True)

    def remove(self, name: str) -> LoRARequest:
        """Let no more requests name an adapter, and return it.

        Raises:
            InvalidRequest: there is none, or it belongs to the options.
        """
        with self._changing() as loaded:
            self._check_not_fixed(name)
            adapters, brought = dict(loaded.adapters), dict(loaded.brought)
            lora = adapters.pop(name, None)
            brought.pop(name, None)
            if lora is None:
                raise InvalidRequest.verbatim(
                    "lora_name", f"The lora adapter '{name}' cannot be found."
                )
            self._write(_Loaded(loaded.last_id, adapters, brought))
            return lora

    def _check_free(self, loaded: _Loaded, name: str, *, in_place: bool) -> None:
        self._check_not_fixed(name)
        if name in loaded.adapters and not in_place:
            raise InvalidRequest.verbatim(  # vLLM's text
                "lora_name",
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                "adapter in place, set 'load_inplace' to True.",
            )

    def _check_not_fixed(self, name: str) -> None:
        if name in self._fixed:
            raise InvalidRequest("lora_name", f"{name} belongs to the option lora_modules")

    @contextlib.contextmanager
    def _changing(self) -> Iterator[_Loaded]:
        """Keep other threads and front ends from changing the file."""
        with exclusive(self._file.with_suffix(".lock")):
            yield self._read()

    def _read(self) -> _Loaded:
        """Return the content of the file, which is read only if it has changed."""
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return _Loaded()
        version = status.st_ino, status.st_mtime_ns
        if version != self._version:
            loaded = msgspec.json.decode(self._file.read_bytes(), type=_Loaded)
            self._loaded, self._version = loaded, version
        return self._loaded

    def _write(self, loaded: _Loaded) -> None:
        """Replace the file at once, so that no reader sees a part of it."""
        new = self._file.with_suffix(".new")
        new.write_bytes(msgspec.json.encode(loaded))
        os.replace(new, self._file)

"""The names of the LoRA adapters of one model, which all its front ends share.

The adapters that clients have loaded are in a file in the private folder of the model's first
engine. It outlives engines, and ends with the last front end.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from paged_backend.process.lifetime import exclusive
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import LoRARequest, numbered, unsupported

FILE = "adapters.json"
MAX_RUNTIME_ADAPTERS = 4096


class _Loaded(msgspec.Struct, frozen=True):
    """The content of the file."""

    last_id: int = 0
    adapters: dict[str, LoRARequest] = {}


class AdapterNames:
    """The adapters that requests can name; any thread may use it.

    Args:
        folder: the private folder of the model's first engine.
        modules: the option ``lora_modules``, with the adapters that clients cannot change.
    """

    def __init__(self, folder: Path, modules: Mapping[str, str] | None) -> None:
        self._file = folder / FILE
        self._fixed = numbered(modules or {})
        self._version: tuple[int, int] | None = None  # state of the file that was read
        self._loaded = _Loaded()

    @property
    def known(self) -> dict[str, LoRARequest]:
        """All adapters by their names, those of the options first."""
        return {**self._fixed, **self._read().adapters}

    def find(self, name: str) -> LoRARequest:
        """Return the adapter of a name.

        Raises:
            InvalidRequest: there is none.
        """
        lora = self._fixed.get(name) or self._read().adapters.get(name)
        if lora is None:
            raise InvalidRequest.verbatim("lora_name", unsupported(name, self.known))
        return lora

    def prepare(self, name: str, path: str, *, in_place: bool) -> LoRARequest:
        """Return an adapter with a new number, which `add` can add once engines have checked it.

        Raises:
            InvalidRequest: there is no place for it, or the name cannot be used.
        """
        with self._changing() as loaded:
            self._check_free(loaded, name, in_place=in_place)
            if len(loaded.adapters) >= MAX_RUNTIME_ADAPTERS:
                raise InvalidRequest(
                    "lora_name", f"cannot be added: {MAX_RUNTIME_ADAPTERS} adapters are loaded"
                )
            number = max(loaded.last_id, len(self._fixed)) + 1
            self._write(_Loaded(number, loaded.adapters))
        return LoRARequest(name, number, path)

    def add(self, lora: LoRARequest, *, in_place: bool) -> LoRARequest | None:
        """Let requests name an adapter; returns the one that it replaces, if any.

        Raises:
            InvalidRequest: another one of this name was added meanwhile.
        """
        with self._changing() as loaded:
            self._check_free(loaded, lora.lora_name, in_place=in_place)
            adapters = {**loaded.adapters, lora.lora_name: lora}
            self._write(_Loaded(loaded.last_id, adapters))
            return loaded.adapters.get(lora.lora_name)

    def remove(self, name: str) -> LoRARequest:
        """Let no more requests name an adapter, and return it.

        Raises:
            InvalidRequest: there is none, or it belongs to the options.
        """
        with self._changing() as loaded:
            self._check_not_fixed(name)
            adapters = dict(loaded.adapters)
            lora = adapters.pop(name, None)
            if lora is None:
                raise InvalidRequest.verbatim(
                    "lora_name", f"The lora adapter '{name}' cannot be found."
                )
            self._write(_Loaded(loaded.last_id, adapters))
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

"""LoRA adapters that requests bring: their weights become files, which engines read.

Only the request's own preparation waits for that. Later requests name the adapter without weights.
"""

from __future__ import annotations

import hashlib
import shutil
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from paged_backend.process.adapter_names import AdapterNames, Brought
from paged_backend.serving.contract import Array
from paged_backend.serving.requests.adapter_changes import AdapterChanges
from paged_backend.values.errors import InvalidRequest, RequestRefused
from paged_backend.values.lora import PACKED_CONFIG, PACKED_FILE, PACKED_WEIGHTS


@dataclass(frozen=True, slots=True, eq=False)
class BroughtAdapter:
    """An adapter in the tensors of a request, in TensorRT-LLM's packed form.

    Attributes:
        name: the name by which requests know it.
        weights: [modules, numbers of the longest row] float16.
        config: [modules, 3] int32.
    """

    name: str
    weights: Array
    config: Array

    @property
    def num_bytes(self) -> int:
        """The bytes of both arrays."""
        return self.weights.nbytes + self.config.nbytes


class BroughtAdapters:
    """Loads adapters that requests bring; any thread may use it.

    Args:
        names: the adapters that requests can name.
        changes: loads and unloads adapters.
        max_bytes: limit of all adapters that were brought, and of those that wait.
    """

    def __init__(self, names: AdapterNames, changes: AdapterChanges, max_bytes: int) -> None:
        self._names = names
        self._changes = changes
        self._max_bytes = max_bytes
        self._waiting: set[BroughtAdapter] = set()
        self._lock = threading.Lock()

    def admit(self, adapter: BroughtAdapter) -> None:
        """Hold an adapter until `leave`.

        Raises:
            InvalidRequest: it is too large.
            RequestRefused: too many wait.
        """
        if adapter.num_bytes > self._max_bytes:
            raise InvalidRequest(
                PACKED_WEIGHTS,
                f"has {adapter.num_bytes} bytes with {PACKED_CONFIG}; at most "
                f"{self._max_bytes} (max_request_lora_bytes)",
            )
        with self._lock:
            waiting = sum(other.num_bytes for other in self._waiting)
            if waiting + adapter.num_bytes > self._max_bytes:
                raise RequestRefused(
                    "queue_full",
                    f"{waiting} bytes of adapters wait to be loaded (max_request_lora_bytes); "
                    "retry after 1 s",
                )
            self._waiting.add(adapter)

    def leave(self, adapter: BroughtAdapter) -> None:
        """Hold an adapter no longer; unknown ones are ignored."""
        with self._lock:
            self._waiting.discard(adapter)

    def load(
        self,
        adapter: BroughtAdapter,
        go_on: Callable[[], None],
        fail: Callable[[Exception], None],
    ) -> None:
        """Load an adapter, unless requests can name it already; one of the functions is called.

        Args:
            adapter: the adapter.
            go_on: called when requests can name the adapter; it must not take long.
            fail: called with the reason if they cannot.

        Raises:
            InvalidRequest: the name stands for another adapter.
            RequestRefused: too many adapters are loaded at once.
        """
        brought = Brought(adapter.num_bytes, _digest(adapter))
        if self._names.was_brought(adapter.name, brought.digest):
            go_on()
            return
        folder = self._names.brought_folder / uuid.uuid4().hex
        try:
            _write(folder, adapter)
            self._changes.bring(adapter.name, str(folder), brought, _Waiting(go_on, fail))
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            is_late = isinstance(error, InvalidRequest) and self._names.was_brought(
                adapter.name, brought.digest
            )
            if not is_late:
                raise
            go_on()  # another request has brought it meanwhile


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that waits for its adapter; see `adapter_changes.Caller`."""

    go_on: Callable[[], None]
    on_error: Callable[[Exception], None]

    def send(self, tensors: dict[str, Array], final: bool) -> None:
        """Let the request go on."""
        self.go_on()

    def fail(self, error: Exception) -> None:
        """End the request."""
        self.on_error(error)


def _digest(adapter: BroughtAdapter) -> str:
    digest = hashlib.sha256()
    for array in (adapter.config, adapter.weights):
        digest.update(f"{array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def _write(folder: Path, adapter: BroughtAdapter) -> None:
    folder.mkdir(parents=True, mode=0o700)
    arrays = {PACKED_WEIGHTS: adapter.weights, PACKED_CONFIG: adapter.config}
    save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()},
        folder / PACKED_FILE,
    )

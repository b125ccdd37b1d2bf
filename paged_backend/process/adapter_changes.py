"""Changes of an engine's adapters that front ends have asked for."""

from __future__ import annotations

from paged_backend.engine.adapters import Adapters
from paged_backend.process import wire
from paged_backend.values.lora import LoRARequest
from paged_backend.values.request import Request


class AdapterChanges:
    """What front ends have asked of an engine's adapters, until it is done.

    Args:
        adapters: the adapters of the engine.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters
        self._open: dict[str, LoRARequest] = {}  # by request_id
        self._loading: dict[str, str] = {}  # change_id -> front end
        self._dropping: list[tuple[str, wire.DropAdapter]] = []  # with the front ends

    def add(self, request: Request) -> None:
        """Remember the adapter of an open request."""
        if request.lora is not None:
            self._open[request.request_id] = request.lora

    def remove(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._open.pop(request_id, None)

    def load(self, sender: str, message: wire.LoadAdapter) -> None:
        """Start to load an adapter.

        Raises:
            InvalidRequest: the engine has no adapters.
        """
        self._adapters.start_loading(message.change_id, message.lora)
        self._loading[message.change_id] = sender

    def drop(self, sender: str, message: wire.DropAdapter) -> None:
        """Forget an adapter as soon as no request has it."""
        self._dropping.append((sender, message))

    def take_done(self) -> list[tuple[str, wire.AdapterChanged]]:
        """Return what was done since the last call, with the front ends that have asked for it."""
        done = [
            (self._loading.pop(change_id), wire.AdapterChanged(change_id, problem))
            for change_id, problem in self._adapters.take_loaded()
        ]
        if self._dropping:
            used = set(self._open.values())
            for sender, message in list(self._dropping):
                if message.lora not in used:
                    self._adapters.forget(message.lora, is_replaced=message.is_replaced)
                    self._dropping.remove((sender, message))
                    done.append((sender, wire.AdapterChanged(message.change_id)))
        return done

"""From the host to the device and back without waiting."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(values: NDArray[Any], device: torch.device) -> Tensor:
    """A copy of `values` on the device, ordered before whatever is launched next."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":  # only a copy from pinned memory leaves the host free to go on
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def record_event() -> torch.cuda.Event:
    """An event after all that has been launched so far."""
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # untyped in its library
    event.record()
    return event


class Arrival:
    """Values on their way to the host."""

    def __init__(self, values: Tensor) -> None:
        pinned = values.device.type == "cuda"
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=pinned)
        self._host.copy_(values, non_blocking=True)
        self._event = record_event() if pinned else None

    def wait(self) -> list[Any]:
        """The values, once they are here."""
        if self._event is not None:
            self._event.synchronize()
        values: list[Any] = self._host.tolist()
        return values

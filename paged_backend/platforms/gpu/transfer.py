"""Asynchronous copies between the host and a device."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.platforms.gpu.device import GpuDevice


class Transfer:
    """Moves values between the host and one device.

    Args:
        device: the other end.
        gpu: the same device. Host memory is pinned for it, so that copies run while the host goes
            on. None if it is a CPU, under Triton's interpreter; copies happen at once then.
    """

    def __init__(self, device: torch.device, gpu: GpuDevice | None) -> None:
        self.device = device
        self._gpu = gpu
        self._pinned = gpu is not None

    def send(self, values: NDArray[Any]) -> Tensor:
        """Return a copy of `values` on the device, made before anything that is launched later."""
        tensor = torch.from_numpy(values)
        if self._pinned:  # a copy from other memory makes the host wait
            tensor = tensor.pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def receive(self, values: Tensor) -> Arrival:
        """Start to copy `values` to the host."""
        host = self.host_buffer(values.shape, values.dtype)
        host.copy_(values, non_blocking=True)
        return Arrival(host, self.record())

    def host_buffer(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Allocate zeros on the host that can be copied without waiting."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._pinned)

    def record(self) -> torch.Event | None:
        """Return an event after all work launched so far; None without a GPU."""
        if self._gpu is None:
            return None
        event = self._gpu.new_event()
        event.record()
        return event


class Arrival:
    """Values on their way to the host."""

    def __init__(self, host: Tensor, event: torch.Event | None) -> None:
        self._host = host
        self._event = event

    def wait(self) -> list[Any]:
        """Wait for the values and return them."""
        values: list[Any] = self.wait_for_array().tolist()
        return values

    def wait_for_array(self) -> NDArray[Any]:
        """Wait for the values and return them as an array."""
        if self._event is not None:
            self._event.synchronize()
        values: NDArray[Any] = self._host.numpy()
        return values

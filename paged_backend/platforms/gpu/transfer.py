"""Asynchronous copies between the host and a device."""

from __future__ import annotations

import time
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

    def start_timer(self) -> Timer:
        """Start to measure the time of what is launched from now on."""
        return Timer(self._gpu)

    def record(self) -> torch.Event | None:
        """Return an event after all work launched so far; None without a GPU."""
        if self._gpu is None:
            return None
        event = self._gpu.new_event()
        event.record()
        return event


class Timer:
    """Measures how long a device takes for what is launched until `stop`.

    Args:
        gpu: the device. None if it is a CPU, which computes during the launch.
    """

    def __init__(self, gpu: GpuDevice | None) -> None:
        self._gpu = gpu
        self._started_s = self._stopped_s = time.perf_counter()
        self._events = [] if gpu is None else [gpu.record_time()]

    def stop(self) -> None:
        """End the measurement; call it once."""
        self._stopped_s = time.perf_counter()
        if self._gpu is not None:
            self._events.append(self._gpu.record_time())

    @property
    def seconds(self) -> float:
        """The time, after the device has computed everything."""
        if not self._events:
            return self._stopped_s - self._started_s
        begin, end = self._events
        return float(begin.elapsed_time(end)) / 1e3


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

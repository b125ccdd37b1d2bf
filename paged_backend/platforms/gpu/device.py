"""A GPU as torch drives it: its memory, events and graphs.

No other module names `torch.cuda`. A GPU that torch drives through another module, such as
`torch.xpu`, needs another class with these methods, which `select.gpu_of` then returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Replay = Callable[[], Tensor]
"""Launches a captured step. It always returns the same tensor, with new contents."""


class GpuDevice:
    """A GPU that torch drives through `torch.cuda`.

    Args:
        device: torch's name of the GPU.

    Attributes:
        new_event: makes an event. Once recorded, it comes after all work launched until then. Each
            step makes some, so this is torch's own class, without a method around it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.new_event: Callable[[], torch.Event] = torch.cuda.Event

    @staticmethod
    def is_present() -> bool:
        """Return True if torch finds a GPU on this machine."""
        return torch.cuda.is_available()

    @staticmethod
    def count() -> int:
        """Return the number of GPUs that torch finds."""
        return torch.cuda.device_count()

    @staticmethod
    def numbered(number: int) -> torch.device:
        """Return a GPU by its number, and make it the one that this process uses."""
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
        return device

    @staticmethod
    def can_reach(number: int, other: int) -> bool:
        """Return whether a GPU can read the memory of another one, both by their numbers."""
        return torch.cuda.can_device_access_peer(number, other)

    @property
    def name(self) -> str:
        """The name of the product, such as ``NVIDIA H100 PCIe``."""
        return torch.cuda.get_device_name(self._device)

    @property
    def has_fp8(self) -> bool:
        """True if the GPU has tensor cores for FP8."""
        return torch.cuda.get_device_capability(self._device) >= (8, 9)

    @property
    def free_and_total_bytes(self) -> tuple[int, int]:
        """The bytes of its memory that no process uses, and all of them."""
        return torch.cuda.mem_get_info(self._device)

    @property
    def allocated_bytes(self) -> int:
        """The bytes of all tensors of this process in its memory."""
        return torch.cuda.memory_allocated(self._device)

    @property
    def peak_bytes(self) -> int:
        """The largest value of `allocated_bytes` since the last call of `reset_peak`."""
        return torch.cuda.max_memory_allocated(self._device)

    def reset_peak(self) -> None:
        """Forget the largest value of `allocated_bytes` so far."""
        torch.cuda.reset_peak_memory_stats(self._device)

    def release_memory(self) -> None:
        """Return the memory of deleted tensors to the GPU, for other processes and graphs."""
        torch.cuda.empty_cache()

    def new_graph_pool(self) -> Any:
        """Make a pool of memory that captured graphs share."""
        return torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], Tensor], pool: Any) -> Replay:
        """Capture the launches of `run` on buffers with fixed addresses as a graph.

        All kernels must be compiled already.

        Args:
            run: launches a step.
            pool: the pool that the graph's memory comes from; None for a separate one.
        """
        run()  # libraries initialize at the first call with a shape, which cannot be captured
        torch.cuda.synchronize()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=pool):
                result = run()
        finally:
            torch.cuda.set_stream(stream)  # torch leaves its own set when a capture fails

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def record_time(self) -> torch.Event:
        """Record when the GPU has computed all work launched so far."""
        event: torch.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in its library
        event.record()
        return event

    def seconds(self, call: Callable[[], object]) -> float:
        """Return the seconds that the GPU takes for what `call` launches."""
        begin = self.record_time()
        call()
        end = self.record_time()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3

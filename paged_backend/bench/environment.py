"""The circumstances that a figure of the engine depends on, and what its device can do."""

from __future__ import annotations

import statistics
import time

import torch
from paged_loadtest.machine import circumstances, output_of

_PACKAGES = ("torch", "triton", "transformers", "numpy")
_COPIES = 20  # timed; as many before them bring the memory's clock up


def environment(device: torch.device) -> dict[str, str]:
    """Date, code, machine and versions."""
    return {
        **circumstances(_PACKAGES),
        **_gpu(device),
        "threads": str(torch.get_num_threads()),
    }


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read and written ones counted, of a copy far larger than any cache.

    The buffers are 2 GiB, or a quarter of what is left on a small GPU, and 256 MiB on a CPU.
    """
    source = torch.arange(_buffer_bytes(device) // 8, device=device)  # int64
    target = torch.empty_like(source)
    for _ in range(_COPIES):
        target.copy_(source)
    seconds = statistics.median(_copy_seconds(target, source) for _ in range(_COPIES))
    bandwidth = 2 * source.nbytes / seconds
    del source, target
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return bandwidth


def _buffer_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 2**28
    free, _ = torch.cuda.mem_get_info(device)
    return min(2**31, free // 4)


def _copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    if source.device.type == "cpu":
        started = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - started
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in its library
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # untyped in its library
    begin.record()
    target.copy_(source)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _gpu(device: torch.device) -> dict[str, str]:
    if device.type == "cpu":
        return {}
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": torch.cuda.get_device_name(device),
        "driver": driver.partition("\n")[0] or "unknown",
        "cuda": str(torch.version.cuda),
    }

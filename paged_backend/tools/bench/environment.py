"""The environment that the engine's figures depend on, and the measured speed of its device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from paged_backend.platforms.select import gpu_of, is_gpu
from paged_backend.tools.machine import circumstances, cpu_property, output_of

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
_PACKAGES = ("torch", "triton", "transformers", "numpy")
_COPIES = 20  # timed; the same number before them raises the memory's clock
# Matrix size, and number of timed products.
_CPU_PRODUCTS, _GPU_PRODUCTS = (512, 5), (8192, 20)


def environment(device: torch.device) -> dict[str, str]:
    """The date, commit, machine and versions."""
    return {
        **circumstances(_PACKAGES),
        **_gpu(device),
        "cpu_flags": cpu_flags(),
        "threads": str(torch.get_num_threads()),
    }


def cpu_flags() -> str:
    """The flags in `FLAGS` that this processor has, separated by spaces."""
    present = cpu_property("flags").split()
    return " ".join(flag for flag in FLAGS if flag in present)


class StolenTime:
    """Measures the CPU time that the hypervisor has given to others, from now on."""

    def __init__(self) -> None:
        self._total, self._stolen = _cpu_ticks()

    def share(self) -> float:
        """The stolen part of all CPU time since the start."""
        total, stolen = _cpu_ticks()
        return (stolen - self._stolen) / max(total - self._total, 1)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, reads plus writes, of a copy far larger than any cache.

    A buffer has 2 GiB, or a quarter of the free memory of a small GPU, and 256 MiB on a CPU.
    """
    source = torch.arange(_buffer_bytes(device) // 8, device=device)  # int64
    copy = partial(torch.empty_like(source).copy_, source)
    return 2 * source.nbytes / _median_seconds(copy, _COPIES, device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations per second of a product of large random matrices."""
    size, count = _GPU_PRODUCTS if is_gpu(device) else _CPU_PRODUCTS
    a, b = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = partial(torch.mm, a, b, out=torch.empty_like(a))
    return 2 * size**3 / _median_seconds(product, count, device)


def _buffer_bytes(device: torch.device) -> int:
    gpu = gpu_of(device)
    if gpu is None:
        return 2**28
    free, _ = gpu.free_and_total_bytes
    return min(2**31, free // 4)


def _median_seconds(call: Callable[[], object], count: int, device: torch.device) -> float:
    for _ in range(count):
        call()
    return statistics.median(_seconds(call, device) for _ in range(count))


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    gpu = gpu_of(device)
    if gpu is not None:
        return gpu.seconds(call)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _cpu_ticks() -> tuple[int, int]:
    """Total and stolen ticks since boot; the columns after `steal` are contained in others."""
    with open("/proc/stat") as file:
        ticks = [int(column) for column in file.readline().split()[1:9]]
    return sum(ticks), ticks[7]


def _gpu(device: torch.device) -> dict[str, str]:
    gpu = gpu_of(device)
    if gpu is None:
        return {}
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "device": gpu.name,
        "driver": driver.partition("\n")[0] or "unknown",
        "cuda": str(torch.version.cuda),
    }

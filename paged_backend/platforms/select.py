"""Chooses the platform. No other module on the serving path checks the type of device."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from paged_backend.checkpoint.model_config import DTYPES
from paged_backend.models.division import Group
from paged_backend.platforms.base import Platform
from paged_backend.platforms.cores import refuse_cores, use_cores
from paged_backend.platforms.gpu.device import GpuDevice
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.cpu import HIGH, CpuOptions


def select_platform(
    device: str,
    dtype: str,
    checkpoint_dtype: torch.dtype,
    cpu: CpuOptions | None = None,
    group: Group | None = None,
) -> Platform:
    """Return the fastest platform for the options `device`, `dtype` and the options of a CPU.

    If the device is a CPU and TRITON_INTERPRET=1, returns the GPU platform. Triton's interpreter
    then runs its kernels, slowly, for tests and for debugging.

    With a group, rank i computes on GPU i, or with a share of the CPU's threads and cores.

    Raises:
        ConfigError: a GPU is asked for and there is none, or an option does not fit the device.
    """
    chosen = resolve_device(device)
    rank, num_ranks = (0, 1) if group is None else (group.rank, group.size)
    if is_gpu(chosen) and group is not None:
        chosen = GpuDevice.numbered(rank)
    if cpu is not None and is_gpu(chosen):
        refuse_cores(cpu)
    elif cpu is not None:
        use_cores(cpu, rank, num_ranks)
    number_type = resolve_dtype(dtype, checkpoint_dtype, chosen)
    interpreted = not is_gpu(chosen) and os.environ.get("TRITON_INTERPRET") == "1"
    splits_float32 = cpu is not None and cpu.float32_matmul_precision == HIGH
    if splits_float32 and (is_gpu(chosen) or interpreted or not _can_split(number_type)):
        raise option_error(
            "float32_matmul_precision", "can be high only on a CPU with AMX and with dtype float32"
        )
    # Each platform is imported only where it is used: Triton exists where there is a GPU or its
    # interpreter, and numba where a CPU serves.
    if is_gpu(chosen) or interpreted:
        from paged_backend.platforms.gpu.platform import GpuPlatform

        return GpuPlatform(chosen, number_type, gpu_of(chosen))
    if number_type == torch.float32:
        from paged_backend.platforms.cpu.platform import CpuPlatform

        return CpuPlatform(splits_float32=splits_float32)
    if number_type == torch.bfloat16:
        from paged_backend.platforms.cpu.platform import BFloat16Platform

        return BFloat16Platform()
    from paged_backend.platforms.cpu.torch_platform import TorchPlatform

    return TorchPlatform(number_type)


def _can_split(dtype: torch.dtype) -> bool:
    from paged_backend.platforms.cpu.amx import has_amx

    return dtype == torch.float32 and has_amx()


def open_group(device: str, store: Path, rank: int, size: int, timeout_s: float) -> Group:
    """Connect the processes that compute a model together.

    Args:
        device: the option.
        store: a file that all ranks name, in a private folder.
        rank: number of this rank, counted from 0.
        size: number of all ranks.
        timeout_s: how long a rank waits for the others.

    Raises:
        ConfigError: there are fewer GPUs than ranks.
    """
    from paged_backend.platforms.portable.group import TorchGroup

    if not is_gpu(resolve_device(device)):
        return TorchGroup.on_cpus(store, rank, size, timeout_s)
    number = GpuDevice.count()
    if number < size:
        raise option_error(
            "tensor_parallel_size", f"must be at most {number}, the number of GPUs; got {size}"
        )
    return TorchGroup.on_gpus(store, rank, size, timeout_s)


def count_gpus(device: str) -> int:
    """Return the number of GPUs that engines with this option may use; 0 for engines on a CPU."""
    return 0 if device == "cpu" else GpuDevice.count()


def resolve_device(option: str) -> torch.device:
    """Return the device that an option names.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    if option == "cuda" and not GpuDevice.is_present():
        raise ConfigError("option device is cuda, but torch finds no NVIDIA device here")
    if option == "auto":
        option = "cuda" if GpuDevice.is_present() else "cpu"
    return torch.device(option)


def resolve_dtype(option: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """Return the option's dtype; `auto` is float32 on a CPU and the checkpoint's on a GPU."""
    if option != "auto":
        return DTYPES[option]
    return checkpoint if is_gpu(device) else torch.float32


def gpu_of(device: torch.device) -> GpuDevice | None:
    """Return the GPU that is a device of torch; None for a CPU."""
    return GpuDevice(device) if is_gpu(device) else None


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a CUDA device."""
    return device.type == "cuda"

"""Chooses the platform. No other module on the serving path checks the type of device."""

from __future__ import annotations

import os
from itertools import permutations

import torch
from torch._C._distributed_c10d import PrefixStore

from paged_backend.checkpoint.model_config import DTYPES
from paged_backend.models.division import ONE_RANK, Group, Place, Ranks, SharedValues
from paged_backend.platforms.base import Platform
from paged_backend.platforms.cores import refuse_cores, use_cores
from paged_backend.platforms.gpu.device import GpuDevice
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.cpu import HIGH, CpuOptions

_ONE_SHOT = "enable_one_shot_all_reduce"


def select_platform(
    device: str,
    dtype: str,
    checkpoint_dtype: torch.dtype,
    cpu: CpuOptions | None = None,
    ranks: Ranks = ONE_RANK,
) -> Platform:
    """Return the fastest platform for the options `device`, `dtype` and the options of a CPU.

    If the device is a CPU and TRITON_INTERPRET=1, returns the GPU platform. Triton's interpreter
    then runs its kernels, slowly, for tests and for debugging.

    With several ranks, rank i of a host computes on GPU i of the host, or with a share of the
    threads and cores of its CPU.

    Raises:
        ConfigError: a GPU is asked for and there is none, or an option does not fit the device.
    """
    chosen = resolve_device(device)
    if is_gpu(chosen) and ranks.size > 1:
        chosen = GpuDevice.numbered(ranks.local_rank)
    if cpu is not None and is_gpu(chosen):
        refuse_cores(cpu)
    elif cpu is not None:
        use_cores(cpu, ranks.local_rank, ranks.num_local)
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


def open_ranks(options: EngineConfig, values: SharedValues, place: Place) -> Ranks:
    """Connect the processes that compute a model together.

    Args:
        options: the engine's options.
        values: values by which the ranks find each other.
        place: the place of this rank.

    Raises:
        ConfigError: this host has fewer GPUs than ranks, or GPUs cannot add up in one kernel.
    """
    from paged_backend.platforms.portable.group import TorchGroup
    from paged_backend.platforms.portable.store import SharedStore, open_tcp_store

    timeout_s = options.distributed_timeout_seconds
    on_gpus = is_gpu(resolve_device(options.device))
    if on_gpus:
        _check_number_of_gpus(place)
        _check_one_shot(options, place)
        store = open_tcp_store(values, place, timeout_s)
    else:
        if options.enable_one_shot_all_reduce:
            raise option_error(_ONE_SHOT, "can be true only on GPUs")
        store = SharedStore(values)

    def group(name: str, number: int, rank: int, size: int) -> Group | None:
        """Connect a group of ranks, by its name and number; None if it has one rank."""
        if size == 1:
            return None
        own = PrefixStore(f"{name}-{number}", store)
        if on_gpus:
            opened = TorchGroup.on_gpus(own, rank, size, timeout_s)
            if options.enable_one_shot_all_reduce and name == "tensor":
                from paged_backend.platforms.gpu.one_shot_sum import OneShotSum

                device = GpuDevice.numbered(place.rank % place.ranks_per_node)
                opened.small_sum = OneShotSum(opened.processes, own, device)
            return opened
        return TorchGroup.on_cpus(own, rank, size, timeout_s, place.host)

    tensor, pipeline = options.tensor_parallel_size, options.pipeline_parallel_size
    stage, number = divmod(place.rank, tensor)
    return Ranks(
        tensor=group("tensor", stage, number, tensor),
        pipeline=group("pipeline", number, stage, pipeline),
        ranks_per_node=place.ranks_per_node,
    )


def _check_one_shot(options: EngineConfig, place: Place) -> None:
    """Refuse sums in one kernel where a GPU cannot read the memory of all others of its stage."""
    if not options.enable_one_shot_all_reduce:
        return
    width = options.tensor_parallel_size
    if place.ranks_per_node % width:
        raise option_error(_ONE_SHOT, "can be true only if all ranks of a stage are on one host")
    first = (place.rank - place.rank % width) % place.ranks_per_node
    for number, other in permutations(range(first, first + width), 2):
        if not GpuDevice.can_reach(number, other):
            raise option_error(
                _ONE_SHOT,
                f"can be true only if GPUs can read each other's memory; GPU {number} cannot read "
                f"that of GPU {other}",
            )


def _check_number_of_gpus(place: Place) -> None:
    count, first = GpuDevice.count(), place.rank - place.rank % place.ranks_per_node
    last = first + place.ranks_per_node - 1
    if count < place.ranks_per_node:
        raise ConfigError(
            f"the host of ranks {first} to {last} has {count} GPUs, and each rank needs its own: "
            "see tensor_parallel_size, pipeline_parallel_size and nnodes"
        )


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

"""The share of a machine's GPUs or cores that one of several engines of a model uses."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace

import torch

from paged_backend.platforms.select import count_gpus
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import option_error

OPTION = "data_parallel_size"
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Machine:
    """What the engines of a model share.

    Attributes:
        num_gpus: number of GPUs that torch finds; 0 for engines on a CPU.
        visible: value of ``CUDA_VISIBLE_DEVICES``, if it is set.
        num_threads: number of threads that torch would use on a CPU.
    """

    num_gpus: int
    visible: str | None
    num_threads: int

    @classmethod
    def here(cls, device: str) -> Machine:
        """Return what engines with this option ``device`` share on this machine."""
        return cls(count_gpus(device), os.environ.get(VISIBLE), torch.get_num_threads())

    def gpus_of(self, config: EngineConfig, number: int) -> str:
        """Return the value of ``CUDA_VISIBLE_DEVICES`` for an engine.

        Raises:
            ConfigError: there are too few GPUs.
        """
        size = config.num_ranks
        if config.data_parallel_size * size > self.num_gpus:
            each = "" if size == 1 else f" for engines of {size} GPUs"
            raise option_error(
                OPTION,
                f"must be at most {self.num_gpus // size}{each}, as there are {self.num_gpus} "
                f"GPUs; got {config.data_parallel_size}",
            )
        names = [str(i) for i in range(self.num_gpus)]
        if self.visible is not None:
            names = self.visible.split(",")
        return ",".join(names[number * size : (number + 1) * size])

    def on_cpu(self, config: EngineConfig, number: int) -> EngineConfig:
        """Return the options of an engine on a CPU, with its share of the cores and threads.

        Raises:
            ConfigError: there are too few cores or threads.
        """
        size, cores = config.data_parallel_size, sorted(config.cores)
        num_threads = config.cpu_threads or len(cores) or self.num_threads
        available = min(num_threads, len(cores) or num_threads) // config.num_ranks
        if size > available:
            raise option_error(
                OPTION, f"must be at most {available} with these cores and threads; got {size}"
            )
        share = len(cores) // size
        own = cores[number * share : (number + 1) * share]
        return replace(
            config,
            cpu_cores=",".join(map(str, own)) or None,
            cpu_threads=num_threads // size,
        )


def take_share(config: EngineConfig, number: int) -> EngineConfig:
    """Return the options of one engine of ``data_parallel_size``, and let it use its GPUs only.

    It must be called before torch uses a GPU. The processes of further ranks inherit the GPUs.

    Args:
        config: options of all engines of the model.
        number: number of the engine, counted from 0.

    Raises:
        ConfigError: the machine has too few GPUs or cores for all engines.
    """
    if config.data_parallel_size == 1:
        return config
    machine = Machine.here(config.device)
    if machine.num_gpus:
        os.environ[VISIBLE] = machine.gpus_of(config, number)
    else:
        config = machine.on_cpu(config, number)
    events = None
    if config.kv_events_config is not None:
        events = asdict(config.kv_events().of_engine(number))
    return replace(config, data_parallel_size=1, kv_events_config=events)

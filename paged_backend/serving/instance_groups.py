"""What a model's instance groups say about its engines and their GPUs.

An instance is a front end. If a group has the kind ``KIND_GPU``, the model has an engine for each
GPU that its groups name, and every instance is a front end of all of them. Otherwise, the model has
the engines of ``data_parallel_size``, which own the devices, whatever the kind of the instances.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError, option_error

GPU_DEVICE_IDS = "GPU_DEVICE_IDS"
# Operators of vllm_backend know this text.
_ONE_GPU = (
    "KIND_GPU is currently for single-GPU models, please specify KIND_MODEL in the model's "
    "config.pbtxt for multi-GPU models"
)


@dataclass(frozen=True, slots=True)
class InstanceGroups:
    """The devices in a model's configuration.

    Attributes:
        num_instances: number of instances of all groups.
        gpus: the server's numbers of the GPUs that groups of the kind ``KIND_GPU`` name.
        device_ids: value of the parameter ``GPU_DEVICE_IDS``; empty without it.
    """

    num_instances: int
    gpus: tuple[int, ...]
    device_ids: str

    @classmethod
    def read(cls, model_config: Mapping[str, Any]) -> InstanceGroups:
        """Read the configuration that the server passes to an instance."""
        groups = model_config["instance_group"]
        gpus = {gpu: None for group in groups if _is_gpu(group) for gpu in group["gpus"]}
        parameter = model_config["parameters"].get(GPU_DEVICE_IDS, {})
        return cls(
            sum(group["count"] * (len(group["gpus"]) if _is_gpu(group) else 1) for group in groups),
            tuple(gpus),
            str(parameter.get("string_value", "")),
        )

    def engines(self, config: EngineConfig) -> EngineConfig:
        """Return the options of the model's engines.

        Raises:
            ConfigError: the options do not fit the groups.
        """
        if not self.gpus:
            return config
        if self.device_ids:
            raise ConfigError(f"parameter {GPU_DEVICE_IDS} cannot be used with KIND_GPU: use gpus")
        if config.num_ranks > 1:
            raise ConfigError(_ONE_GPU)
        if config.data_parallel_size > 1:
            raise option_error(
                "data_parallel_size",
                "must be 1 with KIND_GPU, which means an engine for each GPU; use KIND_MODEL",
            )
        if config.device == "cpu":
            raise option_error("device", "is cpu, but the instance group has the kind KIND_GPU")
        return replace(config, device="cuda", data_parallel_size=len(self.gpus))

    def visible_gpus(self, visible: str | None) -> str | None:
        """Return the value of ``CUDA_VISIBLE_DEVICES`` for all engines together.

        Args:
            visible: its value for the server; None if it is not set. The server counts the GPUs in
                this list from 0.

        Raises:
            ConfigError: ``GPU_DEVICE_IDS`` is not a list of different numbers.
        """
        if self.device_ids:
            return ",".join(_read_ids(self.device_ids))
        if not self.gpus:
            return visible
        names = None if visible is None else visible.split(",")
        return ",".join(str(gpu) if names is None else names[gpu] for gpu in self.gpus)


def _is_gpu(group: Mapping[str, Any]) -> bool:
    return bool(group["kind"] == "KIND_GPU")


def _read_ids(text: str) -> list[str]:
    ids = [word.strip() for word in text.split(",")]
    are_numbers = all(word.isascii() and word.isdecimal() for word in ids)
    if not are_numbers or len({*map(int, ids)}) < len(ids):
        raise ConfigError(
            f"parameter {GPU_DEVICE_IDS} must be a list of different numbers such as 0,1, got "
            f"{text[:60]!a}"
        )
    return ids

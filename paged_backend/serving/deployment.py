"""Reads what the server and a model's config.pbtxt say about one instance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from paged_backend.serving.instance_groups import InstanceGroups

_EXIT_TIMEOUT_S = 30.0  # the server's default


@dataclass(frozen=True, slots=True)
class Deployment:
    """One instance of a model, as the server describes it."""

    name: str
    version: str
    folder: Path  # folder of the version; holds model.json
    backend: str  # the backend's name in config.pbtxt: vllm or paged
    report_vllm_metrics: bool
    unload_if_dead: bool
    groups: InstanceGroups

    @classmethod
    def from_args(cls, args: Mapping[str, str]) -> Deployment:
        """Read the arguments of ``initialize``."""
        config = json.loads(args["model_config"])
        name, version = args["model_name"], args["model_version"]
        return cls(
            name=name,
            version=version,
            folder=Path(args["model_repository"], version),
            backend="vllm" if config["backend"] == "vllm" else "paged",
            report_vllm_metrics=_is_true(config, "REPORT_CUSTOM_METRICS"),
            unload_if_dead=_is_true(config, "ENABLE_VLLM_HEALTH_CHECK"),
            groups=InstanceGroups.read(config),
        )

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the instance's metrics."""
        labels = {"model": self.name, "version": self.version}
        if len(self.groups.gpus) == 1:  # several engines have another label
            labels["gpu"] = str(self.groups.gpus[0])
        return labels


def has_model_control(server_pid: int) -> bool:
    """Return whether the server runs with ``--model-control-mode=explicit``."""
    return _server_flag(server_pid, "model-control-mode") == "explicit"


def exit_timeout_s(server_pid: int) -> float:
    """Return how long the server waits for open requests when it shuts down."""
    try:
        return float(_server_flag(server_pid, "exit-timeout-secs") or "")
    except ValueError:
        return _EXIT_TIMEOUT_S


def _server_flag(server_pid: int, name: str) -> str | None:
    """Return the value of a flag on the server's command line; the last occurrence counts."""
    words = Path(f"/proc/{server_pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    flag, value = f"--{name}", None
    for word, following in pairwise([*words, ""]):
        if word == flag:
            value = following
        elif word.startswith(flag + "="):
            value = word.removeprefix(flag + "=")
    return value


def _is_true(config: Mapping[str, Any], parameter: str) -> bool:
    value = config["parameters"].get(parameter, {})
    return str(value.get("string_value", "")).lower() == "true"

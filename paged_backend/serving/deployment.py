"""What the server and a model's config.pbtxt say about one instance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Deployment:
    """One instance of a model, as the server describes it."""

    name: str
    version: str
    folder: Path  # of the version; holds model.json
    backend: str  # by which name config.pbtxt asked for this code
    gpu: str | None  # the device of an instance of KIND_GPU
    report_vllm_metrics: bool
    unload_if_dead: bool

    @classmethod
    def from_args(cls, args: Mapping[str, str]) -> Deployment:
        """Read the arguments of ``initialize``."""
        config = json.loads(args["model_config"])
        name, version = args["model_name"], args["model_version"]
        device = args["model_instance_device_id"]
        on_gpu = args["model_instance_kind"] == "GPU" and int(device) >= 0
        return cls(
            name=name,
            version=version,
            folder=Path(args["model_repository"], version),
            backend="vllm" if config["backend"] == "vllm" else "paged",
            gpu=device if on_gpu else None,
            report_vllm_metrics=_is_true(config, "REPORT_CUSTOM_METRICS"),
            unload_if_dead=_is_true(config, "ENABLE_VLLM_HEALTH_CHECK"),
        )

    @property
    def labels(self) -> dict[str, str]:
        """The labels of its metrics."""
        labels = {"model": self.name, "version": self.version}
        return labels if self.gpu is None else {**labels, "gpu": self.gpu}


def has_model_control(server_pid: int) -> bool:
    """Whether the server's command line lets models be loaded and unloaded."""
    words = Path(f"/proc/{server_pid}/cmdline").read_bytes().split(b"\0")
    flag, value = b"--model-control-mode", b"explicit"
    return flag + b"=" + value in words or (flag, value) in pairwise(words)


def _is_true(config: Mapping[str, Any], parameter: str) -> bool:
    value = config["parameters"].get(parameter, {})
    return str(value.get("string_value", "")).lower() == "true"

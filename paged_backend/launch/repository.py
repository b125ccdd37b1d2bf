"""The model repository that tritonserver loads: three short files for a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from paged_backend.errors import ConfigError

_CONFIG = """\
# Tensors and the decoupled policy are filled in by the model's auto_complete_config.
# The engine process owns the device, whatever the kind of these instances.
backend: "python"
instance_group [{{ count: {instances} kind: KIND_CPU }}]
"""

_MODEL = '''\
"""What tritonserver loads; the model itself is in the installed package."""

from paged_backend.serving.model import TritonPythonModel

__all__ = ["TritonPythonModel"]
'''

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def write_model_repository(
    root: Path, name: str, engine_options: Mapping[str, object], instances: int
) -> Path:
    """Write the model ``name`` below ``root`` and return its folder.

    ``engine_options`` becomes ``1/model.json``; ``instances`` is the number of stub processes
    that share one engine. Raises ConfigError for a name that cannot stand in a URL or a path,
    and for one that is there already.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"model name {name!r}: use letters, digits, '_', '-' and '.', not starting with "
            "'-' or '.'"
        )
    if instances < 1:
        raise ConfigError(f"instances: must be at least 1, got {instances}")
    folder = root / name
    if folder.exists():
        raise ConfigError(f"{folder} is there already: give another folder or another model name")
    version = folder / "1"
    version.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(_CONFIG.format(instances=instances))
    (version / "model.py").write_text(_MODEL)
    (version / "model.json").write_text(json.dumps(dict(engine_options), indent=2) + "\n")
    return folder


def model_names(repository: Path) -> list[str]:
    """The models of a repository, sorted. Raises ConfigError where there is none."""
    if not repository.is_dir():
        raise ConfigError(f"no model repository at {repository}")
    names = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not names:
        raise ConfigError(f"{repository} holds no model: a folder with a config.pbtxt is missing")
    return names

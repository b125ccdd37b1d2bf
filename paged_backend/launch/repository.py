"""Writes the model repository that tritonserver loads, for a model or a pipeline."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from paged_backend.launch.pipeline import PipelineOptions, knows_the_bound, pipeline_models
from paged_backend.launch.storage import writing
from paged_backend.values.errors import ConfigError

_CONFIG = """\
# Tensors and the decoupled policy are filled in by the model's auto_complete_config.
# Instances are front ends. The engine's process uses the device, unless an instance group has the
# kind KIND_GPU, which means an engine for each of its GPUs.
backend: "python"
instance_group [{{ count: {instances} kind: KIND_CPU }}]
"""

_MODEL = '''\
"""What tritonserver loads; the model itself is in the installed package."""

from paged_backend.serving.{module} import {imported}

__all__ = ["TritonPythonModel"]
'''

_CLASS = "TritonPythonModel"  # the class that the server expects in a model.py
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


def write_model_repository(
    root: Path, name: str, engine_options: Mapping[str, object], instances: int
) -> Path:
    """Write the model ``name`` below ``root`` and return its folder.

    ``engine_options`` becomes ``1/model.json``; ``instances`` is the number of stub processes
    that share one engine. Raises ConfigError for a name that is not valid in a URL or a path, and
    for a name in use.
    """
    _check_name(name)
    if instances < 1:
        raise ConfigError(f"instances: must be at least 1, got {instances}")
    folder = _write(root, name, _CONFIG.format(instances=instances), ("model", _CLASS))
    with writing(folder):
        (folder / "1" / "model.json").write_text(json.dumps(dict(engine_options), indent=2) + "\n")
    return folder


def write_pipeline(
    root: Path,
    name: str,
    engine_options: Mapping[str, object],
    instances: int,
    *,
    prefix: str = "",
    options: PipelineOptions | None = None,
    bounded: bool | None = None,
) -> list[Path]:
    """Write a model and the pipeline around it; returns the folders of all models.

    Args:
        root, name, engine_options, instances: as for ``write_model_repository``.
        prefix: prefix of the names of the other models, for several pipelines.
        options: options of the pipeline's models.
        bounded: whether the server knows ``max_inflight_requests``; default: whether the server
            here does.

    Raises:
        ConfigError: as ``write_model_repository``.
    """
    if prefix:
        _check_name(prefix)
    bounded = knows_the_bound() if bounded is None else bounded
    folders = [write_model_repository(root, name, engine_options, instances)]
    for model in pipeline_models(name, prefix, options or PipelineOptions(), bounded=bounded):
        folders.append(_write(root, model.name, model.config, model.code))
    return folders


def is_model_name(name: str) -> bool:
    """Return whether a model of a repository may have this name."""
    return _NAME.fullmatch(name) is not None


def _check_name(name: str) -> None:
    if not is_model_name(name):
        raise ConfigError(
            f"model name {name!r}: use letters, digits, '_', '-' and '.', not starting with "
            "'-' or '.'"
        )


def _write(root: Path, name: str, config: str, code: tuple[str, str] | None) -> Path:
    """Write a model's folder; ``code`` is the module and the class of its implementation."""
    folder = root / name
    if folder.exists():
        raise ConfigError(f"{folder} is there already: give another folder or another model name")
    version = folder / "1"
    with writing(folder):
        version.mkdir(parents=True)
        (folder / "config.pbtxt").write_text(config)
        if code is None:
            (version / ".gitkeep").touch()  # the server needs the folder, git needs a file
        else:
            (version / "model.py").write_text(_model_file(*code))
    return folder


def _model_file(module: str, name: str) -> str:
    imported = name if name == _CLASS else f"{name} as {_CLASS}"
    return _MODEL.format(module=module, imported=imported)


def model_names(repository: Path) -> list[str]:
    """Return the sorted names of a repository's models. Raises ConfigError if there is none."""
    if not repository.is_dir():
        raise ConfigError(f"no model repository at {repository}")
    names = sorted(path.parent.name for path in repository.glob("*/config.pbtxt"))
    if not names:
        raise ConfigError(f"{repository} holds no model: a folder with a config.pbtxt is missing")
    return names

"""The names of the safetensors files of a checkpoint, without a library that reads them."""

from __future__ import annotations

from pathlib import Path

from paged_backend.errors import ConfigError
from paged_backend.json_file import read_json_object
from paged_backend.validation import shorten

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def indexed_names(folder: Path) -> list[str]:
    """The names of the files that the index of a checkpoint lists; they may be missing.

    Raises:
        ConfigError: there is no index, or it cannot be used.
    """
    weight_map = read_json_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{folder / INDEX}: weight_map must be an object of tensors and files")
    names = sorted({str(file) for file in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{folder / INDEX}: {shorten(name)} must be a file in this folder")
    return names

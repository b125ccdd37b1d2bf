"""The names of the safetensors files of a checkpoint, without a library that reads them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatch
from pathlib import Path

from paged_backend.values.errors import ConfigError
from paged_backend.values.json_file import read_json_object
from paged_backend.values.validation import shorten

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_INDEX_BYTES = 2**26  # the index of a model with 61 layers of 384 experts in FP8 takes a quarter

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
# Files next to the weights of a model: adapters, the state of the training, and a second copy of
# the weights with the names of Mistral's own library.
_OTHERS = (
    *("adapter_*", "adapter.*", "optimizer*", "scheduler*", "scaler*", "training_args*"),
    *("rng_state*", "trainer_state*", "random_states*", "consolidated*"),
)
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_SHARD = re.compile(r"(?P<base>.+)-(?P<number>\d{5,6})-of-(?P<count>\d{5,6})\.safetensors")


def weight_names(folder: Path, names: Collection[str]) -> list[str]:
    """Choose the files that hold the weights.

    They are those that an index lists, or else ``model.safetensors``, or else all safetensors files
    of other names that are no adapter, no state of a training, and no copy for Mistral's library.

    Args:
        folder: the checkpoint, which has the index if there is one.
        names: the files that there are; they need not be in the folder yet.

    Returns:
        The files, which may not be there if an index lists them; empty if there are none.

    Raises:
        ConfigError: an index cannot be used, or one of numbered files is missing.
    """
    index = index_of(names)
    if index is not None:
        return indexed_names(folder, index)
    if SINGLE in names:
        return [SINGLE]
    chosen = sorted(name for name in names if _is_weights(name) and name.endswith(_SUFFIX))
    for name in _missing_shards(chosen):
        raise ConfigError(f"{folder / name} is missing; download it again")
    return chosen


def pickled_names(names: Iterable[str]) -> list[str]:
    """Return the files that hold pickled weights, which are not read."""
    is_pickled = (name for name in names if any(fnmatch(name, kind) for kind in _PICKLED))
    return [name for name in is_pickled if _is_weights(name)]


def indexed_names(folder: Path, index: str = INDEX) -> list[str]:
    """The names of the files that the index of a checkpoint lists; they may be missing.

    Raises:
        ConfigError: there is no index, or it cannot be used.
    """
    path = folder / index
    weight_map = read_json_object(path, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: weight_map must be an object of tensors and files")
    names = sorted({str(file) for file in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{path}: {shorten(name)} must be a file in this folder")
    return names


def index_of(names: Collection[str]) -> str | None:
    """Return the index among the files of a folder; None if there is none.

    Some tools name it after the model, like the files that it lists.
    """
    if INDEX in names:
        return INDEX
    found = [name for name in names if name.endswith(_INDEX_SUFFIX) and _is_weights(name)]
    return found[0] if len(found) == 1 and SINGLE not in names else None


def _is_weights(name: str) -> bool:
    return "/" not in name and not any(fnmatch(name, kind) for kind in _OTHERS)


def _missing_shards(names: Collection[str]) -> Iterable[str]:
    """Yield the files that the numbers in the names of others ask for."""
    for match in filter(None, map(_SHARD.fullmatch, sorted(names))):
        width = len(match["count"])
        # The first one that is missing ends the search, so a large count costs nothing.
        for number in range(1, int(match["count"]) + 1):
            name = f"{match['base']}-{number:0{width}}-of-{match['count']}{_SUFFIX}"
            if name not in names:
                yield name
                break

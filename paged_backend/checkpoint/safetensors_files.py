"""The safetensors files of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from paged_backend.checkpoint.tensor_source import SourceTensor
from paged_backend.checkpoint.weight_index import (
    INDEX,
    SINGLE,
    index_of,
    pickled_names,
    weight_names,
)
from paged_backend.values.errors import ConfigError
from paged_backend.values.regular_file import open_regular
from paged_backend.values.validation import shorten

MAX_HEADER_BYTES = 2**26  # bytes; one file of 61 layers with 384 experts needs a third
_SIZE_BYTES = 8  # size of the number before the header


class Header(NamedTuple):
    """The description of a tensor at the beginning of its file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # by the names of the format, such as F32, BF16, F8_E4M3 or I32


class SafetensorsFiles:
    """The tensors of a folder; see :class:`~paged_backend.checkpoint.tensor_source.TensorSource`.

    Raises:
        ConfigError: there are no files, or a file that the index lists is missing.
    """

    def __init__(self, folder: Path) -> None:
        self._files = weight_files(folder)

    @property
    def num_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.stat().st_size for file in self._files)

    def __iter__(self) -> Iterator[SourceTensor]:
        """Yield each file's tensors, mapped from disk and read as they are copied."""
        for file in self._files:
            with open_tensors(file) as tensors:
                for name in tensors.keys():
                    tensor = tensors.get_tensor(name)
                    origin = f"{file}: tensor {_quoted(name)}"
                    yield SourceTensor(name, tensor, origin, tensor.nbytes)


@contextmanager
def open_tensors(file: Path) -> Iterator[Any]:
    """Open a safetensors file as the library does, and convert its errors within the block.

    Raises:
        ConfigError: the file is not a regular one, truncated or damaged.
    """
    _check_header(file)
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{file} is truncated or damaged ({error}); download it again") from error


def _check_header(file: Path) -> None:
    """Check the size of the header, which the library reads as a whole."""
    with open_regular(file) as stream:
        size = int.from_bytes(stream.read(_SIZE_BYTES), "little")
        length = os.fstat(stream.fileno()).st_size
    if size > min(length, MAX_HEADER_BYTES):
        problem = "is truncated or damaged" if length < size else "is not supported"
        raise ConfigError(
            f"{file} {problem}: its header has {size} bytes, the file {length}, and at most "
            f"{MAX_HEADER_BYTES} are read; download it again"
        )


def read_headers(folder: Path) -> Mapping[str, Header]:
    """Read the names, shapes and dtypes of all tensors of a checkpoint, and none of their numbers.

    Raises:
        ConfigError: there are no files, one is missing or damaged, or two hold the same tensor.
    """
    headers: dict[str, Header] = {}
    for file in weight_files(folder):
        with open_tensors(file) as tensors:
            for name in tensors.keys():
                if name in headers:
                    raise ConfigError(
                        f"{file}: tensor {_quoted(name)} is in {headers[name].file.name}, too; "
                        f"keep the files of one set of weights, or add {INDEX}"
                    )
                part = tensors.get_slice(name)
                headers[name] = Header(file, tuple(part.get_shape()), part.get_dtype())
    return headers


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all present.

    Raises:
        ConfigError: there are none, or one that the index lists is not there.
    """
    names = [path.name for path in folder.iterdir()]
    chosen = weight_names(folder, names)
    for name in chosen:
        if not (folder / name).exists():
            raise ConfigError(
                f"{folder / name}, listed in {index_of(names)}, is missing; download it again"
            )
    if chosen:
        return [folder / name for name in chosen]
    problem = f"{folder} holds neither {SINGLE} nor {INDEX} nor other weights in safetensors files"
    if pickled_names(names):
        problem += "; its pickled weights are not read: convert them with transformers' "
        problem += "save_pretrained"
    raise ConfigError(problem)


def has_weights(folder: Path) -> bool:
    """Return whether a folder has files of weights, which may be incomplete."""
    return folder.is_dir() and bool(weight_names(folder, [path.name for path in folder.iterdir()]))


def _quoted(name: str) -> str:
    return shorten(name, 200, quote=False)

"""The safetensors files of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from paged_backend.checkpoint.tensor_source import SourceTensor
from paged_backend.checkpoint.weight_index import INDEX, SINGLE, indexed_names
from paged_backend.errors import ConfigError
from paged_backend.validation import shorten

_PICKLED = ("*.bin", "*.pt", "*.pth")


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
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():
                        tensor = tensors.get_tensor(name)
                        origin = f"{file}: tensor {shorten(name, 200, quote=False)}"
                        yield SourceTensor(name, tensor, origin, tensor.nbytes)
            except (SafetensorError, OSError) as error:
                raise ConfigError(
                    f"{file} is truncated or damaged ({error}); download it again"
                ) from error


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, all present.

    Raises:
        ConfigError: there are none, or one that the index lists is not there.
    """
    if (folder / INDEX).exists():
        return [_present(folder, name) for name in indexed_names(folder)]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    problem = f"{folder} holds neither {SINGLE} nor {INDEX}"
    if any(True for pattern in _PICKLED for _ in folder.glob(pattern)):
        problem += "; its pickled weights are not read: convert them with transformers' "
        problem += "save_pretrained"
    raise ConfigError(problem)


def _present(folder: Path, name: str) -> Path:
    if not (folder / name).exists():
        raise ConfigError(f"{folder / name}, listed in {INDEX}, is missing; download it again")
    return folder / name

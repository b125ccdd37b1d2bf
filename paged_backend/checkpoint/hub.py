"""From the name a user gives to the folder or the file that holds the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.errors import ConfigError
from paged_backend.validation import shorten

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
_WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
_UNWANTED = ["original/*", "consolidated*"]  # the same weights again in the maker's own layout


def resolve_model(name: str) -> Path:
    """The folder of a bundled model, a folder, a GGUF file, or a Hugging Face id, downloaded.

    Raises:
        ConfigError: there is no such folder, and it cannot be downloaded either.
    """
    if name in BUNDLED_MODELS:
        return BUNDLED_MODELS[name]
    folder = Path(name).expanduser()
    if folder.is_dir() or (is_gguf(folder) and folder.is_file()):  # no pipe, whose end never comes
        return folder
    if folder.exists():
        raise ConfigError(
            f"model {name} is a file; give the folder that holds config.json, or a GGUF file"
        )
    if is_gguf(folder):
        raise ConfigError(f"model file {shorten(name)} does not exist")
    if not _HUB_ID.fullmatch(name):
        raise ConfigError(f"model folder {shorten(name)} does not exist")
    return _download(name)


def is_gguf(checkpoint: Path) -> bool:
    """Return whether a checkpoint is a GGUF file; all others are folders."""
    return checkpoint.suffix == ".gguf" and not checkpoint.is_dir()


def download_config(name: str) -> Path:
    """Return the config.json of a Hugging Face id, which is downloaded without the rest.

    Raises:
        ConfigError: it cannot be downloaded.
    """
    from huggingface_hub import hf_hub_download

    with _download_errors(name):
        return Path(hf_hub_download(name, "config.json"))


def _download(name: str) -> Path:
    # Imported here: it costs a third of a second, and a folder needs none of it.
    from huggingface_hub import snapshot_download

    with _download_errors(name):
        return Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))


@contextmanager
def _download_errors(name: str) -> Iterator[None]:
    """Convert the errors of a download, which name the model then."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"model {name} is neither a folder here nor could it be downloaded from Hugging Face; "
            f"check the name and the connection ({shorten(reason, 200, quote=False)})"
        ) from error

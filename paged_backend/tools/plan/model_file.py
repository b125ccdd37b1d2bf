"""Finds and reads the config.json of the model that the user names."""

from __future__ import annotations

import re
from pathlib import Path

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.hub import download_config, is_gguf
from paged_backend.checkpoint.size_limits import check_sizes
from paged_backend.checkpoint.text_part import text_part
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)  # a user and a model
# Exists next to the package in a checkout; an installed package has only the bundled models.
_SHAPES = Path(__file__).parents[3] / "loadtest" / "models"


def read_config(path: Path) -> ConfigFile:
    """Read a config.json, or the metadata of a GGUF file.

    Raises:
        ConfigError: the file cannot be used.
    """
    if not is_gguf(path):
        config = ConfigFile.read(path)
        check_sizes(config)
        return text_part(config)
    from paged_backend.checkpoint.gguf.config import read_gguf_config  # needs NumPy

    return read_gguf_config(path)


def find_config(name: str) -> Path:
    """Find the config.json of a bundled shape, a folder or a Hugging Face id.

    `name` may also be the file itself, or a GGUF file.

    Raises:
        ConfigError: there is no such file.
    """
    bundled = _bundled()
    path = Path(name).expanduser()
    if not path.exists() and name.lower() in bundled:
        return bundled[name.lower()]
    if not path.exists() and _ID.fullmatch(name):
        return download_config(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model: no config.json at {shorten(name, 200, quote=False)}; give a folder or a file, "
            f"or one of {', '.join(bundled)}"
        )
    return path


def _bundled() -> dict[str, Path]:
    shapes = {path.parent.name: path for path in sorted(_SHAPES.glob("*/config.json"))}
    bundled = {name: folder / "config.json" for name, folder in BUNDLED_MODELS.items()}
    return {**bundled, **shapes}

"""A digest by which two hosts see that they have the same checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

from paged_backend.values.regular_file import read_regular

_WEIGHTS = (".safetensors", ".gguf")
_MAX_CONFIG_BYTES = 2**24


def fingerprint(model: Path) -> str:
    """Return a digest of config.json, and of the names and sizes of all files of weights.

    Args:
        model: a folder or a GGUF file.

    Raises:
        ConfigError: config.json cannot be read.
    """
    files = [model] if model.is_file() else sorted(model.iterdir())
    facts = [f"{file.name} {file.stat().st_size}" for file in files if file.suffix in _WEIGHTS]
    digest = hashlib.sha256("\n".join(facts).encode())
    config = model / "config.json"
    if config.exists():
        digest.update(read_regular(config, _MAX_CONFIG_BYTES))
    return digest.hexdigest()[:16]

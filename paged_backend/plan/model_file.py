"""From the name that a user gives to a config.json."""

from __future__ import annotations

from pathlib import Path

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.errors import ConfigError
from paged_backend.validation import shorten

# Beside the package in a checkout; an installed package has the demo model alone.
_SHAPES = Path(__file__).parents[2] / "loadtest" / "models"


def find_config(name: str) -> Path:
    """The config.json of a bundled shape, of a folder, or the file itself.

    Raises:
        ConfigError: there is none.
    """
    bundled = _bundled()
    path = Path(name).expanduser()
    if not path.exists() and name.lower() in bundled:
        return bundled[name.lower()]
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
    return {"demo": MODEL_DIR / "config.json", **shapes}

"""Names of models: folders, and what is said of a name that leads nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_backend.checkpoint.bundled import BUNDLED_MODELS
from paged_backend.checkpoint.hub import resolve_model
from paged_backend.values.errors import ConfigError


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_gguf_file_is_taken_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.raises(ConfigError, match="model file .* does not exist"):
        resolve_model(str(path))
    path.touch()
    assert resolve_model(str(path)) == path


def test_paths_that_are_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        resolve_model(str(tmp_path / "nowhere"))
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="give the folder that holds config.json"):
        resolve_model(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", BUNDLED_MODELS)
def test_bundled_models_have_names(name: str) -> None:
    assert (resolve_model(name) / "config.json").is_file()

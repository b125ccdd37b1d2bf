"""The plan of a model that is named by its Hugging Face id; a server here stands for the hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub, Repository, running_hub

from paged_backend.checkpoint.bundled import MODEL_DIR

FILES = {"config.json": (MODEL_DIR / "config.json").read_bytes(), "model.safetensors": b"weights"}


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as hub:
        hub.repositories["org/small"] = Repository.of(FILES)
        hub.repositories["org/gguf"] = Repository.of({"m.gguf": b"weights"})
        yield hub


def plan(model: str, hub: Hub, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paged_backend.cli", "plan", model, "--json"]
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home)}
    environment |= {"NO_PROXY": "127.0.0.1"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_only_the_configuration_is_downloaded(hub: Hub, tmp_path: Path) -> None:
    done = plan("org/small", hub, tmp_path)
    assert done.returncode == 0, done.stderr
    local = plan(str(MODEL_DIR), hub, tmp_path)
    assert json.loads(done.stdout)["gpus"] == json.loads(local.stdout)["gpus"]
    assert hub.fetched("org/small") == ["config.json"]
    assert not any("safetensors" in path for _, path in hub.requests)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("org/other", "model org/other is neither a folder here nor"),
        ("org/gguf", "model org/gguf has no file config.json on "),
    ],
)
def test_what_cannot_be_downloaded_is_named(
    hub: Hub, tmp_path: Path, model: str, expected: str
) -> None:
    done = plan(model, hub, tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"paged-backend: error: {expected}")
    assert len(done.stderr.splitlines()) == 1

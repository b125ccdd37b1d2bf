"""Checkpoints that are made to harm: files that never end, sizes that nothing stands behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from oracle import make_engine

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.checkpoint.folder import MAX_TOKENIZER_BYTES
from paged_backend.checkpoint.task import resolve_task
from paged_backend.config import EngineConfig
from paged_backend.errors import ConfigError
from paged_backend.json_file import MAX_JSON_BYTES, MAX_JSON_DEPTH
from paged_backend.text.tokenizer import load_tokenizer

INDEX = "model.safetensors.index.json"
Replace = Callable[[Path], Any]


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


ENDLESS: dict[str, Replace] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a folder": Path.mkdir,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint("llama2", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, folder)
    return folder


def start(folder: Path) -> None:
    """Read all files of a checkpoint that a server reads."""
    load_tokenizer(folder)
    make_engine(folder)


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        start(folder)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        INDEX,
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "quantize_config.json",
        "hf_quant_config.json",
        "modules.json",
    ],
)
def test_no_file_is_read_that_does_not_end(
    name: str, kind: str, llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).unlink(missing_ok=True)
    ENDLESS[kind](tmp_path / name)
    assert refused(tmp_path) == f"{tmp_path / name} must be a regular file, but is {kind}"


@pytest.mark.parametrize("name", ["special_tokens_map.json", "vocab.json", "merges.txt"])
def test_no_file_that_a_library_finds_is_read_if_it_does_not_end(
    name: str, llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()  # so transformers makes a tokenizer of the others
    os.mkfifo(tmp_path / name)
    assert refused(tmp_path) == f"{tmp_path / name} must be a regular file, but is a pipe"


def test_a_socket_is_no_file(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").unlink()
    monkeypatch.chdir(tmp_path)  # the paths of sockets are short
    socket_at(Path("config.json"))
    assert refused(tmp_path).endswith("must be a regular file, but is a socket")


def test_a_gguf_file_that_is_a_device(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.symlink_to("/dev/zero")
    with pytest.raises(ConfigError):
        make_engine(path)


def test_links_to_files_are_followed_as_the_cache_of_the_hub_has_them(
    llama: Path, tmp_path: Path
) -> None:
    for path in llama.iterdir():
        (tmp_path / path.name).symlink_to(path)
    start(tmp_path)


def sparse(path: Path, num_bytes: int) -> None:
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, num_bytes)  # takes no room on the disk


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("config.json", MAX_JSON_BYTES),
        ("generation_config.json", MAX_JSON_BYTES),
        ("tokenizer_config.json", MAX_JSON_BYTES),
        ("chat_template.jinja", MAX_JSON_BYTES),
        ("tokenizer.json", MAX_TOKENIZER_BYTES),
        (INDEX, 2**26),
    ],
)
def test_files_have_a_largest_size(name: str, limit: int, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    sparse(tmp_path / name, limit + 1)
    assert f"{name} must have at most {limit} bytes, but has {limit + 1}" in refused(tmp_path)


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 5_000, 1_000_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", INDEX, "modules.json"])
def test_json_is_not_nested_deep(name: str, depth: int, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text('{"a":' * depth + "1" + "}" * depth)
    assert refused(tmp_path) == (
        f"{tmp_path / name} must be nested at most {MAX_JSON_DEPTH} levels deep"
    )

"""Checkpoints that are made to harm: files that never end, sizes that nothing stands behind."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint
from encoders import make_encoder
from oracle import make_engine

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.checkpoint.folder import MAX_TOKENIZER_BYTES
from paged_backend.checkpoint.limits import (
    MAX_EXPERTS,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_HIDDEN_SIZE,
    MAX_INNER_SIZE,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB_SIZE,
)
from paged_backend.checkpoint.safetensors_files import MAX_HEADER_BYTES
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.errors import ConfigError
from paged_backend.values.json_file import MAX_JSON_BYTES, MAX_JSON_DEPTH

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


def make_fallback(folder: Path) -> object:
    return make_checkpoint("gemma", folder)


def make_bert(folder: Path) -> object:
    return make_encoder("bert", folder)


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


@pytest.mark.parametrize("size", [MAX_HEADER_BYTES + 1, 2**60])
def test_the_header_of_weights_has_a_largest_size(size: int, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    sparse(tmp_path / "model.safetensors", 2**28)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(size.to_bytes(8, "little"))
    assert f"its header has {size} bytes, the file {2**28}, and at most" in refused(tmp_path)


@pytest.mark.parametrize("depth", [MAX_JSON_DEPTH + 1, 5_000, 1_000_000])
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", INDEX, "modules.json"])
def test_json_is_not_nested_deep(name: str, depth: int, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_text('{"a":' * depth + "1" + "}" * depth)
    assert refused(tmp_path) == (
        f"{tmp_path / name} must be nested at most {MAX_JSON_DEPTH} levels deep"
    )


SIZES = [
    ("num_hidden_layers", MAX_LAYERS),
    ("num_attention_heads", MAX_HEADS),
    ("num_key_value_heads", MAX_HEADS),
    ("head_dim", MAX_HEAD_DIM),
    ("hidden_size", MAX_HIDDEN_SIZE),
    ("intermediate_size", MAX_INNER_SIZE),
    ("vocab_size", MAX_VOCAB_SIZE),
    ("max_position_embeddings", MAX_POSITIONS),
]


def edit(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("key", "limit"), SIZES)
def test_each_size_has_a_limit(
    key: str, limit: int, load_format: str, llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    for value in (limit + 1, 10**18, 10**400):
        edit(tmp_path, **{key: value})
        with pytest.raises(ConfigError, match=f"{key} must be .*up to {limit}, got") as caught:
            make_engine(tmp_path, load_format=load_format)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "values", "message"),
    [
        ("qwen3-moe", {"num_experts": MAX_EXPERTS + 1}, "num_experts must be an integer up to"),
        ("qwen3-moe", {"num_experts": 4096, "num_hidden_layers": 64}, "give 262144 experts"),
        ("qwen3-moe", {"moe_intermediate_size": 10**9}, "moe_intermediate_size must be"),
        ("qwen2-window", {"sliding_window": 10**30}, "sliding_window must be"),
        ("qwen3-moe", {"mlp_only_layers": [0] * 10**6}, "mlp_only_layers must be a list"),
        ("gemma3", {"layer_types": ["full_attention"] * 10**5}, "layer_types must be a list of 3"),
        ("llama2", {"eos_token_id": [1] * 2000}, "eos_token_id must have at most"),
        ("llama2", {"rope_scaling": {"type": "yarn", "factor": 1e9}}, "factor must give at most"),
        ("llama2", {"rope_scaling": {"type": "linear", "factor": 10**400}}, "factor must be a num"),
        ("llama3", {"rope_parameters": {"rope_type": "llama3", "factor": 2, "low_freq_factor": 1,
          "high_freq_factor": 4, "original_max_position_embeddings": 10**30}}, "original_max_po"),
        ("phi4-mini", {"rope_parameters": {"rope_type": "longrope", "short_factor": [10**400] * 6,
          "long_factor": [1] * 6, "partial_rotary_factor": 0.75}}, "short_factor must be a list"),
    ],
)  # fmt: skip
def test_no_other_field_multiplies_anything(
    family: str, values: dict[str, object], message: str, tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path)
    (tmp_path / "generation_config.json").unlink()
    edit(tmp_path, **values)
    assert message in refused_engine(tmp_path)


def refused_engine(folder: Path, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        make_engine(folder, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": MAX_LAYERS}, "tensors are missing, such as model.layers."),
        ({"vocab_size": MAX_VOCAB_SIZE}, "tensor model.embed_tokens.weight has shape [199, 64]"),
        ({"intermediate_size": MAX_INNER_SIZE}, ".mlp.gate_proj.weight has shape [112, 64]"),
        ({"num_attention_heads": MAX_HEADS, "num_key_value_heads": MAX_HEADS,
          "head_dim": MAX_HEAD_DIM}, ".self_attn.q_proj.weight has shape [64, 64]"),
        ({"max_position_embeddings": MAX_POSITIONS}, "are too few for max_model_len (16777216)"),
    ],
)  # fmt: skip
def test_sizes_are_compared_with_the_files_before_memory_is_taken(
    values: dict[str, object], words: str, llama: Path, tmp_path: Path
) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    edit(tmp_path, **values)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert words in refused_engine(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18  # 256 MiB in KiB


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": MAX_LAYERS + 1}, "num_hidden_layers must be an integer up to 1024"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers must be an integer up to 1024"),
        ({"num_labels": 10**9}, "num_labels must be an integer up to"),
        ({"text_config": {"num_hidden_layers": 10**7}}, "text_config.num_hidden_layers must be"),
        ({"vocab_size": 2**22}, "but the safetensors files hold"),
        ({"intermediate_size": 2**22}, "but the safetensors files hold"),
    ],
)
@pytest.mark.parametrize("make", [make_fallback, make_bert])
def test_models_that_transformers_computes(
    make: Callable[[Path], object], values: dict[str, object], words: str, tmp_path: Path
) -> None:
    make(tmp_path)
    edit(tmp_path, **values)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert words in refused_engine(tmp_path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**18

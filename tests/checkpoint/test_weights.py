"""Loading weights: every layout of files, and each thing that can be wrong with one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from paged_backend.checkpoint import weights
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.weights import load_weights, random_weights
from paged_backend.models.base import Model
from paged_backend.models.loader import build_model, load_model
from paged_backend.platforms.cpu.platform import CpuPlatform
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError


def unpacked_parameters(folder: Path) -> dict[str, Tensor]:
    """A model's memory before the weights are in it."""
    model = build_model(load_model_config(folder), 64, TorchPlatform(torch.float32))
    return {name: place for name, place in model.parameters().items() if isinstance(place, Tensor)}


def load(folder: Path, **options: object) -> Model:
    config = EngineConfig(**options)
    return load_model(config, load_model_config(folder), None, folder, CpuPlatform())


def edit(folder: Path, **changes: Tensor | None) -> None:
    """Replace tensors of a checkpoint in one file; None removes one, `__` stands for a dot."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for key, tensor in changes.items():
        name = key.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path, {"format": "pt"})


def assert_refused(folder: Path, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("family", ["qwen2", "qwen3-window", "llama-linear-bias"])
def test_each_tensor_lands_in_its_slot(family: str, tmp_path: Path) -> None:
    state = make_checkpoint(family, tmp_path).state_dict()
    parameters = unpacked_parameters(tmp_path)
    load_weights(tmp_path, parameters)
    assert set(state) - set(parameters) <= {"lm_head.weight"}
    for name, parameter in parameters.items():
        assert torch.equal(parameter, state[name]), name


def test_shards(tmp_path: Path) -> None:
    state = make_checkpoint("llama3", tmp_path, max_shard_size="100KB").state_dict()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    parameters = unpacked_parameters(tmp_path)
    load_weights(tmp_path, parameters)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, state[name]), name


@pytest.mark.parametrize(
    "names",
    [
        ["gptq_model-4bit-128g.safetensors"],
        ["pytorch_model.safetensors"],
        ["part-1.safetensors", "part-2.safetensors"],
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    ],
)
def test_files_of_any_name_without_an_index(names: list[str], tmp_path: Path) -> None:
    state = make_checkpoint("llama3", tmp_path).state_dict()
    tensors = sorted(load_file(tmp_path / "model.safetensors").items())
    (tmp_path / "model.safetensors").unlink()
    for part, name in enumerate(names):
        save_file(dict(tensors[part :: len(names)]), tmp_path / name)
    for other in ("adapter_model", "optimizer", "consolidated", "consolidated-00001-of-00001"):
        save_file({"layers.0.x": torch.ones(2)}, tmp_path / f"{other}.safetensors")
    (tmp_path / "training_args.bin").touch()
    parameters = unpacked_parameters(tmp_path)
    load_weights(tmp_path, parameters)
    for name, parameter in parameters.items():
        assert torch.equal(parameter, state[name]), name
    load(tmp_path)


def test_an_index_of_another_name(tmp_path: Path) -> None:
    state = make_checkpoint("llama3", tmp_path, max_shard_size="100KB").state_dict()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    (tmp_path / "model.safetensors.index.json").unlink()
    for file in tmp_path.glob("model-*.safetensors"):
        file.rename(tmp_path / f"gptq_{file.name}")
    index["weight_map"] = {name: f"gptq_{file}" for name, file in index["weight_map"].items()}
    (tmp_path / "gptq_model.safetensors.index.json").write_text(json.dumps(index))
    save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")  # not listed
    parameters = unpacked_parameters(tmp_path)
    load_weights(tmp_path, parameters)
    assert all(torch.equal(parameter, state[name]) for name, parameter in parameters.items())


@pytest.mark.parametrize("offset", [0.0, 0.5])
def test_an_output_layer_beside_tied_embeddings(
    offset: float, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_checkpoint("qwen3-window", tmp_path)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    head = embedding.clone()
    head[-1] += offset
    edit(tmp_path, lm_head__weight=head)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(oracle.lm_head.weight, head)
    hidden = torch.randn(3, embedding.shape[1])
    logits = load(tmp_path, dtype="float32").compute_logits(hidden)
    torch.testing.assert_close(logits, oracle.lm_head(hidden), atol=1e-4, rtol=1e-4)
    assert ("tie_word_embeddings" in caplog.text) == bool(offset)


@pytest.mark.parametrize("options", [{}, {"quantization": "int8"}], ids=["float", "int8"])
def test_tied_weights_by_the_name_of_the_output_layer(
    options: dict[str, object], tmp_path: Path
) -> None:
    make_checkpoint("qwen3-window", tmp_path)
    expected = load(tmp_path, dtype="float32", **options)
    table = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    edit(tmp_path, model__embed_tokens__weight=None, lm_head__weight=table)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(oracle.model.embed_tokens.weight, table)
    hidden = torch.randn(3, table.shape[1])
    logits = load(tmp_path, dtype="float32", **options).compute_logits(hidden)
    assert torch.equal(logits, expected.compute_logits(hidden))


def test_the_output_layer_takes_no_other_place(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    edit(tmp_path, model__embed_tokens__weight=None)
    assert_refused(tmp_path, "1 tensor is missing, such as model.embed_tokens.weight")


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "one.safetensors")
    save_file({"model.norm.weight": torch.ones(64)}, tmp_path / "two.safetensors")
    assert_refused(tmp_path, "two.safetensors: tensor model.norm.weight is in one.safetensors, too")


def test_a_missing_one_of_numbered_files(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00002-of-00003.safetensors")
    assert_refused(tmp_path, "model-00001-of-00003.safetensors is missing; download it again")


def test_tensors_are_converted(tmp_path: Path) -> None:
    state = make_checkpoint("llama2", tmp_path).state_dict()
    edit(tmp_path, model__norm__weight=state["model.norm.weight"].bfloat16())
    parameters = unpacked_parameters(tmp_path)
    load_weights(tmp_path, parameters)
    assert torch.equal(
        parameters["model.norm.weight"], state["model.norm.weight"].bfloat16().float()
    )


def test_leftovers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    state = make_checkpoint("smollm", tmp_path).state_dict()
    edit(
        tmp_path,
        lm_head__weight=state["lm_head.weight"].clone(),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8),
    )
    load(tmp_path)


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)

    def embedding(seed: int) -> Tensor:
        parameters = unpacked_parameters(tmp_path)
        random_weights(parameters, tensors_of(load_model_config(tmp_path)), seed)
        assert torch.all(parameters["model.layers.1.self_attn.k_norm.weight"] == 1)
        return parameters["model.embed_tokens.weight"]

    assert torch.equal(embedding(1), embedding(1))
    assert not torch.equal(embedding(1), embedding(2))
    assert embedding(1).std().item() == pytest.approx(0.02, rel=0.05)


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    load(tmp_path, load_format="dummy")


def test_missing_weights(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "training_args.bin").touch()
    assert_refused(tmp_path, "holds neither model.safetensors nor")
    (tmp_path / "pytorch_model.bin").touch()
    assert_refused(tmp_path, "convert them")


@pytest.mark.parametrize("kept", [0, 4, 200, -1])
def test_truncated_file(kept: int, tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    assert_refused(tmp_path, str(path), "truncated or damaged", "download it again")


def test_missing_tensor(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    edit(tmp_path, model__norm__weight=None)
    assert_refused(tmp_path, "1 tensor is missing, such as model.norm.weight")


def test_unexpected_tensor(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    edit(tmp_path, model__layers__0__adapter__weight=torch.ones(2))
    assert_refused(tmp_path, "model.layers.0.adapter.weight", "has no place")


def test_wrong_shape(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    edit(tmp_path, model__norm__weight=torch.ones(65))
    assert_refused(tmp_path, "model.norm.weight has shape [65]", "asks for [64]")


def test_quantized_tensor(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    edit(tmp_path, model__norm__weight=torch.ones(64, dtype=torch.int8))
    assert_refused(tmp_path, "model.norm.weight is torch.int8", "quantized")


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "weight_map must be an object"),
        ({"weight_map": {"a": "model-00001.safetensors"}}, "is missing; download it again"),
        ({"weight_map": {"a": "../model.safetensors"}}, "must be a file in this folder"),
    ],
)
def test_bad_index(index: dict[str, object], message: str, tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(tmp_path, "model.safetensors.index.json", message)


def test_max_model_len_is_bounded_by_the_model(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    assert load(tmp_path).max_model_len == 512
    assert load(tmp_path, max_model_len=100).max_model_len == 100
    with pytest.raises(ConfigError, match="max_model_len must be at most 512"):
        load(tmp_path, max_model_len=513)


@pytest.mark.parametrize(("delay", "shown"), [(0.0, True), (60.0, False)])
def test_a_long_load_shows_its_progress_behind_a_pipe(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    delay: float,
    shown: bool,
) -> None:
    # The server's stderr is a pipe to the launcher: a bar for terminals only was never seen.
    make_checkpoint("llama2", tmp_path)
    monkeypatch.setattr(weights, "BAR_AFTER_S", delay)
    load_weights(tmp_path, unpacked_parameters(tmp_path))
    assert ("Loading weights" in capsys.readouterr().err) == shown

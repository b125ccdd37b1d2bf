"""Models that transformers computes: what is checked before they serve, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import Oracle, make_engine, run, tokens_of
from safetensors.torch import load_file, save_file

from paged_backend.engine.worker import Worker
from paged_backend.models.transformers_attention import LayerFinder
from paged_backend.models.transformers_linear import KernelLinear
from paged_backend.models.transformers_model import TransformersModel
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError


def load(folder: Path, **options: object) -> Worker:
    values = {"model": str(folder), "dtype": "float32", "kv_cache_memory_bytes": 2**22, **options}
    return Worker(EngineConfig.from_mapping(values), folder)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "absent"}))


@pytest.mark.parametrize("model_impl", ["auto", "transformers"])
def test_linear_layers_are_ours(tmp_path: Path, model_impl: str) -> None:
    make_checkpoint("hunyuan_v1_moe", tmp_path)
    model = load(tmp_path, model_impl=model_impl).model_runner._model
    assert isinstance(model, TransformersModel)
    kinds = {name: type(layer) for name, layer in model._model.named_modules()}
    assert kinds["model.layers.0.self_attn.q_proj"] is KernelLinear
    assert kinds["lm_head"] is KernelLinear
    # The model reads the weight of its router, so this layer cannot be another one.
    assert kinds["model.layers.0.mlp.gate.wg"] is torch.nn.Linear


def test_a_family_of_ours_can_be_computed_by_transformers(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    worker = load(tmp_path, model_impl="transformers")
    assert isinstance(worker.model_runner._model, TransformersModel)
    assert not isinstance(load(tmp_path).model_runner._model, TransformersModel)


@pytest.mark.parametrize("model_impl", ["paged", "vllm"])
def test_ours_is_asked_for_but_there_is_none(tmp_path: Path, model_impl: str) -> None:
    make_checkpoint("gpt2", tmp_path)
    with pytest.raises(ConfigError, match=r"config.json: architectures must be one of Llama"):
        load(tmp_path, model_impl=model_impl)


def test_attention_that_ignores_a_window_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("starcoder2", tmp_path, sliding_window=8)
    find = LayerFinder.layers
    monkeypatch.setattr(
        LayerFinder,
        "layers",
        lambda self, config: [replace(layer, window=None) for layer in find(self, config)],
    )
    with pytest.raises(ConfigError, match="logits differ from those of its own attention by"):
        load(tmp_path)


@pytest.mark.parametrize("names", [["gpt.safetensors"], ["a.safetensors", "b.safetensors"]])
def test_files_of_any_name(tmp_path: Path, names: list[str]) -> None:
    oracle = Oracle("gpt2", tmp_path)
    tensors = sorted(load_file(tmp_path / "model.safetensors").items())
    (tmp_path / "model.safetensors").unlink()
    for part, name in enumerate(names):
        save_file(dict(tensors[part :: len(names)]), tmp_path / name)
    save_file({"x": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    work = [(list(range(3, 40)), 12)]
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))


def test_tied_weights_by_the_name_of_the_output_layer(tmp_path: Path) -> None:
    oracle = Oracle("gpt2", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors.pop("transformer.wte.weight")
    save_file(tensors, path)
    work = [(list(range(3, 40)), 12)]
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))


def rename_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["transformer.h.0.mlp.c_fc.wight"] = tensors.pop("transformer.h.0.mlp.c_fc.weight")
    save_file(tensors, path, {"format": "pt"})


def cut_a_tensor(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "transformer.h.0.mlp.c_fc.weight"
    tensors[name] = tensors[name][:, :5].contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rename_a_tensor, r"1 missing tensors, such as .*c_fc.weight"),
        (cut_a_tensor, r"c_fc.weight"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"x"), "is truncated"),
        (lambda folder: change_config(folder, architectures=["Mystery"]), "architectures is"),
        (lambda folder: change_config(folder, model_type="mystery"), "config.json: "),
        (lambda folder: change_config(folder, n_positions=-1), "max_position_embeddings must be"),
        (lambda folder: change_config(folder, quantization_config={"a": 1}), "quant"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path: Path, damage: Any, message: str) -> None:
    make_checkpoint("gpt2", tmp_path)
    damage(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantization": "int8"}, "quantized weights are not supported"),
        ({"task": "embed"}, "can only generate"),
        ({"pooling_type": "mean"}, "can only generate"),
        ({"max_model_len": 600}, "max_model_len must be at most 512"),
    ],
)
def test_options_that_do_not_fit(tmp_path: Path, options: dict[str, object], message: str) -> None:
    make_checkpoint("gpt2", tmp_path)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, **options)

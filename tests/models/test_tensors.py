"""The list of a checkpoint's tensors is what its files hold and what its model takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint

from paged_backend.checkpoint.classifier import ClassifierSpec, ScoreFunction
from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.safetensors_files import read_headers
from paged_backend.checkpoint.stored_tensor import StoredTensor
from paged_backend.checkpoint.tensor_names import usual_name
from paged_backend.models.layers import Kernels
from paged_backend.models.loader import build_model
from paged_backend.platforms.cpu.platform import CpuPlatform
from paged_backend.platforms.cpu.torch_platform import TorchPlatform

PLATFORMS = [CpuPlatform(), TorchPlatform(torch.float32)]
Shapes = Mapping[str, tuple[int, ...]]


def listed(config: ModelConfig) -> Shapes:
    return {name: spec.shape for name, spec in tensors_of(config).items()}


def taken(config: ModelConfig, kernels: Kernels) -> Shapes:
    """The shapes of a model's parameters that a checkpoint must have."""
    shapes = {}
    for name, place in build_model(config, 64, kernels).parameters().items():
        if not isinstance(place, StoredTensor):
            shapes[name] = tuple(place.shape)
        elif not place.kind.optional:
            shapes[name] = place.kind.shape
    return shapes


@pytest.mark.parametrize("family", FAMILIES)
def test_the_list_is_that_of_the_model_and_of_the_files(family: str, tmp_path: Path) -> None:
    make_checkpoint(family, tmp_path)
    config = load_model_config(tmp_path)
    stored = {
        usual_name(name): header.shape
        for name, header in read_headers(tmp_path).items()
        if not name.endswith(("slope_rate", "_decay"))  # MiniMax's, which are computed
    }
    assert listed(config) == stored
    for kernels in PLATFORMS:
        for tied in (True, False):
            other = replace(config, tied_embeddings=tied)
            assert taken(other, kernels) == listed(other)
            hidden_only = replace(other, has_output_layer=False)
            assert taken(hidden_only, kernels) == listed(hidden_only)


@pytest.mark.parametrize("kernels", PLATFORMS, ids=["cpu", "torch"])
def test_the_list_has_the_head_of_a_reranker(kernels: Kernels, tmp_path: Path) -> None:
    make_checkpoint("qwen3", tmp_path)
    config = load_model_config(tmp_path)
    for tied in (True, False):
        by_tokens = replace(
            config,
            tied_embeddings=tied,
            has_output_layer=False,
            classifier=ClassifierSpec(ScoreFunction.SIGMOID, (3, 4)),
            scores_by_tokens=True,
        )
        assert taken(by_tokens, kernels) == listed(by_tokens)
    path = tmp_path / "config.json"
    values = {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    scorer = load_model_config(tmp_path)
    assert "score.weight" in listed(scorer)
    assert taken(scorer, kernels) == listed(scorer)

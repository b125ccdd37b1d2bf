"""Each part of a variant matters: without it, logits are no longer those of transformers."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file

from paged_backend.checkpoint.factors import QueryGrowth
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.checkpoint.moe import (
    GEGLU_TANH,
    BesideNorms,
    ExpertGroups,
    Scoring,
    SwiGLU,
)
from paged_backend.checkpoint.shape import Activation, LayerNorms, QKNormScope, Rotary
from paged_backend.models.attention import AttentionMetadata
from paged_backend.models.kv_cache import KVCacheFormat, KVCacheSpec
from paged_backend.models.loader import load_model
from paged_backend.models.states import StatePool, StateSpec
from paged_backend.platforms.cpu.torch_platform import TorchPlatform
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import ConfigError

LENGTH = 60
NORMS = astuple(BesideNorms())
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("llama4", {"windows": ()}),
    ("llama4", {"windows": (20, 20, None, 20)}),
    ("llama4", {"qk_norm": None}),
    ("llama4", {"query_growth": None}),
    ("llama4", {"query_growth": QueryGrowth(0.4, 16, only_unrotated=True)}),
    ("llama4-plain", {"qk_norm": QKNormScope.ROTATED_HEAD}),
    ("llama4-plain", {"query_growth": QueryGrowth(0.4, 16, first=1)}),
    ("mistral", {"windows": ()}),
    ("ministral", {"windows": ()}),
    ("ministral3", {"query_growth": None}),
    ("deepseek-v2", {"attention_scale": 24**-0.5}),
    ("deepseek-v3", {"attention_scale": 24**-0.5}),
    ("deepseek-v3", {"rotary": Rotary()}),
    ("minicpm3", {"rotary": Rotary(interleaved=True)}),
    ("minicpm3", {"embedding_scale": 1.0}),
    ("minicpm3", {"residual_scale": 1.0}),
    ("minicpm3", {"logits_scale": 1.0}),
    ("gemma2", {"windows": ()}),
    ("gemma2", {"attention_softcap": None}),
    ("gemma2", {"logits_softcap": None}),
    ("gemma2", {"attention_scale": None}),
    ("gemma2", {"embedding_scale": 1.0}),
    ("gemma2", {"unit_offset": False}),
    ("gemma2", {"activation": Activation.SILU}),
    ("gemma3", {"windows": ()}),
    ("gemma4", {"windows": ()}),
    ("gemma4", {"value_norm": False}),
    ("gemma4", {"attention_scale": None}),
    ("gemma4", {"logits_softcap": None}),
    ("gemma4-plain", {"value_norm": False}),
    ("glm4", {"rotary": Rotary(dim=16)}),
    ("glm4-moe", {"rotary": Rotary(dim=16, interleaved=True)}),
    ("granite", {"residual_scale": 1.0}),
    ("granite", {"logits_scale": 1.0}),
    ("granite-hybrid-moe", {"residual_scale": 1.0}),
    ("kimi-linear", {"attention_scale": 16**-0.5}),
    ("minimax", {"residual_factors": None}),
    ("olmo3", {"windows": ()}),
    ("zamba2", {"attention_scale": None}),
    ("zamba2-plain", {"attention_scale": None}),
]


def logits(folder: Path, changes: dict[str, Any]) -> torch.Tensor:
    """Logits [LENGTH, vocab_size] of a prompt; of the variant, some parts are changed."""
    platform = TorchPlatform(torch.float32)
    config = load_model_config(folder)
    config = replace(config, variant=replace(config.variant, **changes))
    model = load_model(EngineConfig(), config, None, folder, platform)
    stored = KVCacheFormat(torch.float32)
    spec = KVCacheSpec.of(model.attention_layers, 16, stored, model.max_model_len)
    num_groups, num_blocks = len(spec.groups), -(-LENGTH // 16)
    tables = 1 + torch.arange(num_groups * num_blocks, dtype=torch.int32).view(num_groups, 1, -1)
    meta = AttentionMetadata(
        query_start_loc=torch.tensor([0, LENGTH], dtype=torch.int32),
        seq_lens=torch.tensor([LENGTH], dtype=torch.int32),
        block_tables=tables.unbind(),
        slot_mappings=tuple(16 * int(table[0, 0]) + torch.arange(LENGTH) for table in tables),
        positions=torch.arange(LENGTH, dtype=torch.int32),
        num_decodes=0,
        state_slots=torch.tensor([[0, 1]], dtype=torch.int32),
    )
    attention = platform.attention(spec, num_groups * num_blocks + 1)
    if model.state_layers:
        states = StateSpec(tuple(model.state_layers), num_slots=2)
        attention.states = StatePool(states, platform.state_functions, platform.device)
    return model.compute_logits(model.forward(torch.arange(LENGTH), attention, meta, None))


@pytest.mark.parametrize(("family", "changes"), CHANGES)
def test_a_part_that_is_left_out_shows(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_checkpoint(family, tmp_path)
    with torch.no_grad():
        expected = reference(torch.arange(LENGTH).unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits(tmp_path, {}), expected, atol=1e-4, rtol=1e-4)
    assert (logits(tmp_path, changes) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama4", {"of_inputs": False}),
        ("llama4-plain", {"scoring": Scoring.SOFTMAX}),
        ("deepseek-v2", {"groups": None}),
        ("deepseek-v2", {"scale": 1.0}),
        ("deepseek-v3", {"groups": None}),
        ("deepseek-v3", {"groups": ExpertGroups(4, 2, num_scored=1)}),
        ("deepseek-v3", {"scale": 1.0}),
        ("deepseek-v3", {"norm_topk_prob": False}),
        ("glm4-moe-lite", {"scoring": Scoring.SOFTMAX}),
        ("glm4-moe", {"groups": None}),
        ("glm4-moe", {"scale": 1.0}),
        ("gemma4-moe", {"num_experts_per_tok": 1}),
        ("granite-hybrid-moe", {"scoring": Scoring.SOFTMAX}),
        ("kimi-linear", {"groups": None}),
        ("kimi-linear", {"scale": 1.0}),
        ("nemotron-h-moe", {"groups": None}),
        ("nemotron-h-latent", {"norm_topk_prob": True}),
    ],
)
def test_a_part_of_the_routing_that_is_left_out_shows(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_checkpoint(family, tmp_path)
    with torch.no_grad():
        expected = reference(torch.arange(LENGTH).unsqueeze(0)).logits[0]
    moe = load_model_config(tmp_path).moe
    assert moe is not None
    changed = replace(moe, routing=replace(moe.routing, **changes))
    assert (logits(tmp_path, {"moe": changed}) - expected).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma2", {"norms": LayerNorms()}),
        ("qwen3", {"qk_norm": None}),
        ("olmo2", {"qk_norm": None}),
        ("gpt-oss", {"sinks": False}),
        ("gemma4", {"qk_norm": None}),
        ("gemma4", {"layer_scalars": False}),
        ("gemma4", {"layer_inputs": None}),
    ],
)
def test_weights_that_are_left_out_are_refused(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"(norm.weight|sinks|scalar|per_layer.weight) has no place in this architecture",
    ):
        logits(tmp_path, changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": SwiGLU()},
        {"activation": replace(GEGLU_TANH, cubic=0.0)},
        {"beside_norms": BesideNorms(mlp_input=NORMS[2], experts_input=NORMS[0])},
        {"beside_norms": BesideNorms(mlp_output=NORMS[3], experts_output=NORMS[1])},
        {"beside_norms": BesideNorms(router=NORMS[0], mlp_input=NORMS[4])},
    ],
)
def test_another_activation_or_norm_beside_an_mlp_shows(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    reference = make_checkpoint("gemma4-moe", tmp_path)
    with torch.no_grad():
        expected = reference(torch.arange(LENGTH).unsqueeze(0)).logits[0]
    torch.testing.assert_close(logits(tmp_path, {}), expected, atol=1e-4, rtol=1e-4)
    moe = load_model_config(tmp_path).moe
    assert moe is not None
    found = logits(tmp_path, {"moe": replace(moe, **changes)})
    assert (found - expected).abs().max() > 1e-2 * expected.std()


def test_factors_of_experts_that_are_left_out_are_refused(tmp_path: Path) -> None:
    make_checkpoint("gemma4-moe", tmp_path)
    moe = load_model_config(tmp_path).moe
    assert moe is not None
    changed = replace(moe, routing=replace(moe.routing, has_factors=False))
    with pytest.raises(ConfigError, match=r"per_expert_scale has no place"):
        logits(tmp_path, {"moe": changed})


def test_keys_and_values_of_another_layer_show(tmp_path: Path) -> None:
    reference = make_checkpoint("gemma4", tmp_path)
    with torch.no_grad():
        expected = reference(torch.arange(LENGTH).unsqueeze(0)).logits[0]
    *layers, sharing, last = load_model_config(tmp_path).variant.layers
    assert sharing.shared_with == 1
    other = (*layers, replace(sharing, shared_with=0), last)
    assert (logits(tmp_path, {"layers": other}) - expected).abs().max() > 1e-2


def test_heads_of_another_size_do_not_fit_the_weights(tmp_path: Path) -> None:
    make_checkpoint("gemma4", tmp_path)
    first, second, *others = load_model_config(tmp_path).variant.layers
    swapped = (first, replace(second, head_dim=32), *others)
    with pytest.raises(ConfigError, match=r"layers.1.self_attn.* has shape"):
        logits(tmp_path, {"layers": swapped})


def test_weights_of_keys_that_a_layer_does_not_compute_are_not_read(tmp_path: Path) -> None:
    """The published files of Gemma 4 have them for all layers."""
    make_checkpoint("gemma4", tmp_path)
    expected = logits(tmp_path, {})
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for name in ("k_proj", "v_proj", "k_norm"):
        tensors[f"model.layers.3.self_attn.{name}.weight"] = torch.full((3,), torch.nan)
    save_file(tensors, file, metadata={"format": "pt"})
    assert torch.equal(logits(tmp_path, {}), expected)
    tensors["model.layers.3.self_attn.x_proj.weight"] = torch.zeros(3)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"layers.3.self_attn.x_proj.weight has no place"):
        logits(tmp_path, {})

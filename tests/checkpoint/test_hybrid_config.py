"""Values in the config.json of hybrid families that are refused, each with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import values_of
from transformers import AutoConfig, AutoModelForCausalLM

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.values.errors import ConfigError

_MLPS = {"layers_block_type": ["mlp", "mlp"]}


@pytest.mark.parametrize(
    ("family", "name", "change", "message"),
    [
        ("nemotron-h", "NemotronHForCausalLM", _MLPS, "layers have neither attention nor a state"),
        ("lfm2", "Lfm2ForCausalLM", {"layer_types": ["x"] * 3}, "layer_types holds 'x'; known: "),
        (
            "granite-hybrid",
            "GraniteMoeHybridForCausalLM",
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            "num_experts_per_tok must be an integer from 1 up to 4, got 5",
        ),
        ("bamba", "BambaForCausalLM", {"mamba_d_head": 15}, "mamba_n_heads .8. times"),
        ("bamba", "BambaForCausalLM", {"mamba_n_groups": 3}, "must divide 8 heads"),
        ("bamba", "BambaForCausalLM", {"time_step_limit": [2, 1]}, "time_step_limit must be 0 or"),
        ("falcon-h1", "FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "a list of 5 numbers"),
        (
            "nemotron-h",
            "NemotronHForCausalLM",
            {"layers_block_type": ["full_attention", "conv"]},
            "layer_types holds 'conv'",
        ),
        (
            "nemotron-h-moe",
            "NemotronHForCausalLM",
            {"n_group": 3},
            "n_group must divide n_routed_experts .8. into groups of 2 or more, got 3",
        ),
        (
            "kimi-linear",
            "KimiLinearForCausalLM",
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]},
            },
            "linear_attn_config: full_attn_layers and kda_layers must have each layer from 1 to 3",
        ),
        ("minimax", "MiniMaxForCausalLM", {"layer_types": ["x"] * 3}, "layer_types holds 'x'; kno"),
        ("jamba", "JambaForCausalLM", {"attn_layer_offset": 3}, "attn_layer_offset must be an"),
        ("mamba", "MambaForCausalLM", {"time_step_rank": 0}, "mamba_dt_rank must be an integer"),
        ("falcon-mamba", "FalconMambaForCausalLM", {"mixer_rms_eps": 0}, "mixer_rms_eps must be"),
        ("mamba2", "Mamba2ForCausalLM", {"num_heads": 7}, "mamba_n_heads .7. times mamba_d_head"),
        ("recurrent-gemma", "RecurrentGemmaForCausalLM", {"block_types": ["x"]}, "block_types"),
        ("zamba2", "Zamba2ForCausalLM", {"layers_block_type": ["attention"] * 5}, "layer_types ho"),
        (
            "zamba2",
            "Zamba2ForCausalLM",
            {"num_key_value_heads": 2},
            "num_key_value_heads must be 4",
        ),
        ("zamba2", "Zamba2ForCausalLM", {"num_attention_heads": 3}, "must divide 128"),
        ("zamba2", "Zamba2ForCausalLM", {"use_long_context": True}, "use_long_context is true"),
        ("zamba2", "Zamba2ForCausalLM", {"tie_word_embeddings": False}, "can only be true for a"),
    ],
)
def test_values_that_are_refused(
    tmp_path: Path, family: str, name: str, change: dict[str, object], message: str
) -> None:
    AutoConfig.for_model(**values_of(family)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"architectures": [name]}
    path.write_text(json.dumps(values))
    load_model_config(tmp_path)  # without the change, it can be read
    path.write_text(json.dumps(values | change))
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)


def test_older_files_of_kimi_linear_say_the_same(tmp_path: Path) -> None:
    AutoConfig.for_model(**values_of("kimi-linear")).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["KimiLinearForCausalLM"]}
    path.write_text(json.dumps(values))
    newer = load_model_config(tmp_path)
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads"):
        del values[key]
    section = {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 3}
    path.write_text(json.dumps(values | {"linear_attn_config": section}))
    assert load_model_config(tmp_path).variant == newer.variant
    section["num_heads"] = 4
    path.write_text(json.dumps(values | {"linear_attn_config": section}))
    assert load_model_config(tmp_path).variant != newer.variant


@pytest.mark.parametrize(
    ("name", "values", "count"),
    [
        pytest.param(
            "MambaForCausalLM",
            {"hidden_size": 768, "num_hidden_layers": 24, "vocab_size": 50_280, "state_size": 16},
            129_135_360,
            id="mamba-130m",
        ),
        pytest.param(
            "FalconMambaForCausalLM",
            {
                "expand": 16,  # intermediate_size says how many channels there are
                "hidden_size": 4096,
                "intermediate_size": 8192,
                "num_hidden_layers": 64,
                "vocab_size": 65_024,
                "tie_word_embeddings": False,
            },
            7_272_665_088,
            id="falcon-mamba-7b",
        ),
        pytest.param(
            "Mamba2ForCausalLM",
            {
                "hidden_size": 4096,
                "num_hidden_layers": 64,
                "vocab_size": 32_768,
                "time_step_limit": [0.0, float("inf")],
            },
            7_285_403_648,
            id="Mamba-Codestral-7B",
        ),
    ],
)
def test_parameters_of_published_models_without_attention(
    name: str, values: dict[str, object], count: int
) -> None:
    """The numbers are those of the models' pages."""
    file = ConfigFile({"architectures": [name], **values}, "config.json")
    tensors = tensors_of(read_shape(file)).values()
    assert sum(spec.num_elements for spec in tensors) == count


@pytest.mark.parametrize("attention_adapters", [False, True])
def test_parameters_of_zamba_2_with_its_default_layers(attention_adapters: bool) -> None:
    """They are those of transformers, for a file that names neither layers nor most sizes."""
    values: dict[str, Any] = {
        "num_mem_blocks": 2,
        "n_mamba_heads": 80,
        "use_shared_attention_adapter": attention_adapters,
    }
    config = AutoConfig.for_model("zamba2", **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    sizes = {"hidden_size": 2560, "num_hidden_layers": 54, "vocab_size": 32_000}
    file = ConfigFile({"architectures": ["Zamba2ForCausalLM"], **sizes, **values}, "config.json")
    stored = {name: spec.shape for name, spec in tensors_of(read_shape(file)).items()}
    assert stored == {name: tuple(each.shape) for name, each in model.named_parameters()}

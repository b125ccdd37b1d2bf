"""GLM-4.5: settings that its checkpoints differ in, and the form of the published files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import values_of
from lora_oracle import ATTENTION, MLP, LoraOracle, lora_options, run_requests
from oracle import Oracle, make_engine, mixed_work, run, tokens_of
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.fallback_config import uses_fallback
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.checkpoint.shape import Biases, QKNormScope
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.tools.plan.sizes import count_parameters
from paged_backend.values.errors import ConfigError

ARCHITECTURE = "Glm4MoeForCausalLM"
# The keys of the published files of GLM-4.5-Air, in the form of transformers 4.
AIR: dict[str, Any] = {
    "architectures": [ARCHITECTURE],
    "attention_bias": True,
    "eos_token_id": [151_329, 151_336, 151_338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "max_position_embeddings": 131_072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151_329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_qk_norm": False,
    "vocab_size": 151_552,
}
# What the files of GLM-4.5 and GLM-4.6 have in place of it.
LARGE: dict[str, Any] = {
    "first_k_dense_replace": 3,
    "hidden_size": 5120,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "num_hidden_layers": 92,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
# Tensors of the MTP layer, in the published files.
MORE = (
    *("eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head.head", "shared_head.norm"),
    *("self_attn.q_proj", "mlp.experts.0.up_proj", "mlp.gate", "input_layernorm"),
)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"use_qk_norm": False}, id="no norm of queries and keys"),
        pytest.param({"attention_bias": False}, id="no biases"),
        pytest.param({"n_group": 1, "topk_group": 1}, id="one group"),
        pytest.param({"norm_topk_prob": False}, id="scores as weights"),
        pytest.param({"first_k_dense_replace": 0}, id="experts in all layers"),
        pytest.param({"first_k_dense_replace": 3}, id="experts in no layer"),
        pytest.param({"rope_parameters": {"partial_rotary_factor": 1.0}}, id="whole heads"),
        pytest.param(
            {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000.0}},
            id="YaRN, of a half of each head",
        ),
    ],
)
def test_tokens_with_other_settings(changes: dict[str, Any], tmp_path: Path) -> None:
    oracle, work = Oracle("glm4-moe", tmp_path, **changes), mixed_work(6)
    assert not uses_fallback(tmp_path, "auto")
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 3}, r"n_group must divide n_routed_experts \(8\)"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok must be an integer from 1 up to 4"),
        ({"use_qk_norm": 1}, "use_qk_norm must be true or false"),
        ({"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor must give an"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers must be an integer from 0"),
    ],
)
def test_values_that_are_refused(changes: dict[str, Any], message: str) -> None:
    values = {**values_of("glm4-moe"), "architectures": [ARCHITECTURE], **changes}
    with pytest.raises(ConfigError, match=message):
        read_shape(ConfigFile(values, "config.json"))


def test_absent_keys_have_the_values_of_transformers() -> None:
    required = (
        *("architectures", "hidden_size", "intermediate_size", "max_position_embeddings"),
        *("num_hidden_layers", "vocab_size"),
    )
    # The class has no size of heads, so that their number must divide the hidden size.
    short = {key: AIR[key] for key in required} | {"num_attention_heads": 32}
    long = AutoConfig.for_model("glm4_moe", **short).to_dict()
    assert read_shape(ConfigFile(short, "short")) == read_shape(ConfigFile(long, "long"))


@pytest.mark.parametrize(
    ("values", "billions", "active"), [(AIR, 106, 12), (AIR | LARGE, 355, 32)], ids=["Air", "large"]
)
def test_published_files_are_read(
    values: dict[str, Any], billions: int, active: int, tmp_path: Path
) -> None:
    """Numbers of parameters are published in billions; the active ones do not count embeddings."""
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_model_config(tmp_path)
    assert not uses_fallback(tmp_path, "auto")
    assert config.eos_token_ids == (151_329, 151_336, 151_338)
    assert config.dtype == torch.bfloat16
    assert (config.head_dim, config.ropes[0].dim) == (128, 64)
    assert config.ropes[0].frequencies[16] == pytest.approx(1e6**-0.5)
    assert config.variant.biases == Biases(qkv=True)
    assert config.variant.qk_norm is (QKNormScope.HEAD if values["use_qk_norm"] else None)
    assert config.variant.moe_layers.index(True) == values["first_k_dense_replace"]
    parameters = count_parameters(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    state = model.state_dict().values()
    assert parameters.total == sum(tensor.numel() for tensor in state)
    assert parameters.total / 1e9 == pytest.approx(billions, rel=0.01)
    unread = parameters.embedding + parameters.experts * (1 - 8 / values["n_routed_experts"])
    assert (parameters.total - unread) / 1e9 == pytest.approx(active, abs=1)


def test_a_checkpoint_in_the_published_form(tmp_path: Path) -> None:
    """Its keys of the rotary embedding are outside of a section, and it has a layer more."""
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5}
    oracle = Oracle("glm4-moe", tmp_path, rope_parameters=rope)
    file, path = tmp_path / "model.safetensors", tmp_path / "config.json"
    more = {f"model.layers.3.{name}.weight": torch.ones(4, 4) for name in MORE}
    save_file(load_file(file) | more, file)
    values = json.loads(path.read_text())
    del values["rope_parameters"]
    outer = {key: AIR[key] for key in ("rope_scaling", "rope_theta", "partial_rotary_factor")}
    path.write_text(json.dumps(values | outer))
    work = mixed_work(4)
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))
    path.write_text(json.dumps(values | outer | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ConfigError, match=r"model\.layers\.3\..* has no place"):
        make_engine(tmp_path)


def test_adapters_of_attention_and_shared_experts(tmp_path: Path) -> None:
    oracle = LoraOracle("glm4-moe", tmp_path, [(4, (*ATTENTION, *MLP)), (2, ATTENTION)])
    requests = oracle.requests(6, 60, 6)
    outputs = run_requests(make_engine(oracle.folder, **lora_options(oracle)), requests)
    oracle.confirm(requests, outputs)

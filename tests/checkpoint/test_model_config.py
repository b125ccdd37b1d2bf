"""Reading config.json: both generations of files, and each thing that can be wrong with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from oracle import make_engine
from transformers import AutoModelForCausalLM

from paged_backend.checkpoint.model_config import ModelConfig, load_model_config
from paged_backend.values.errors import ConfigError
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
Load = Callable[..., ModelConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def load_changed(**changes: Any) -> ModelConfig:
        values = {key: value for key, value in {**LLAMA, **changes}.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(values))
        return load_model_config(tmp_path)

    return load_changed


def test_reads_a_file_of_transformers_4(load: Load) -> None:
    config = load()
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.dtype == torch.bfloat16
    assert config.tied_embeddings
    assert config.windows == (None, None)
    assert config.eos_token_ids == (2,)
    assert config.ropes[0].frequencies[0] == 1
    assert config.ropes[0].frequencies[4] == pytest.approx(10000**-0.5)


def test_both_forms_of_rope_are_the_same(load: Load) -> None:
    scaling = {"rope_type": "linear", "factor": 4.0}
    old = load(rope_theta=5000.0, rope_scaling={"type": "linear", "factor": 4.0})
    new = load(rope_theta="absent", rope_parameters={**scaling, "rope_theta": 5000.0})
    assert old.ropes == new.ropes
    assert old.ropes[0].frequencies[0] == 0.25


def test_version_5_names_the_dtype_otherwise(load: Load) -> None:
    assert load(torch_dtype="absent", dtype="float16").dtype == torch.float16
    assert load(torch_dtype="absent").dtype == torch.float32


def test_heads_default_to_multi_head_attention(load: Load) -> None:
    assert load(num_key_value_heads="absent").num_kv_heads == 4


def test_generation_config_has_the_last_word_on_eos(load: Load, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7, 100]}')
    assert load().eos_token_ids == (5, 7)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load().eos_token_ids == (2,)
    assert load(eos_token_id=None).eos_token_ids == ()


def test_mistral_windows(load: Load) -> None:
    mistral = {"architectures": ["MistralForCausalLM"]}
    assert load(**mistral, sliding_window=32).windows == (32, 32)
    assert load(**mistral, sliding_window=None).windows == (None, None)
    assert load(**mistral).windows == (4096, 4096)


@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_windows(load: Load, name: str) -> None:
    qwen = {"architectures": [name], "sliding_window": 8}
    assert load(**qwen).windows == (None, None)
    assert load(**qwen, use_sliding_window=True).windows == (None, None)
    assert load(**qwen, use_sliding_window=True, max_window_layers=1).windows == (None, 8)
    kinds = ["sliding_attention", "full_attention"]
    assert load(**qwen, use_sliding_window=True, layer_types=kinds).windows == (8, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "must be one of LlamaForCausalLM, Mistral"),
        ({"architectures": None}, "architectures must be one of"),
        ({"hidden_size": "absent"}, "hidden_size is missing"),
        ({"hidden_size": 65}, "must divide hidden_size"),
        ({"num_attention_heads": 0}, "num_attention_heads must be an integer from 1, got 0"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be an integer"),
        ({"num_key_value_heads": 3}, "must divide num_attention_heads"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"hidden_size": 60, "num_attention_heads": 4}, "head_dim must be even"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported"),
        ({"torch_dtype": "float8_e4m3fn"}, "torch_dtype must be one of float32"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "one of default, dynamic, linear"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": [1]}, "rope_scaling must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is not"),
        (
            {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4,
                                 "high_freq_factor": 1}},
            "high_freq_factor must be above low_freq_factor",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id must be an integer or a list"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
             "layer_types": ["full_attention"]},
            "layer_types must be a list of 2",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True,
             "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types holds 'chunked_attention'",
        ),
    ],
)  # fmt: skip
def test_refuses(load: Load, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**changes)
    assert message in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_refuses_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"cannot read .*config.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma2", ["attn_logit_softcapping"]),
        ("gemma2", ["final_logit_softcapping"]),
        ("glm4-moe", ["n_group", "rms_norm_eps", "rope_parameters", "topk_group"]),
        ("gpt-oss", ["rms_norm_eps"]),
        ("gpt-oss", ["rope_parameters"]),
        ("mixtral", ["rms_norm_eps", "rope_parameters"]),
        ("ministral3", ["rms_norm_eps"]),
        ("ministral3", ["rope_parameters"]),
        ("olmo2", ["rms_norm_eps"]),
        ("olmo3", ["rms_norm_eps"]),
        ("olmoe", ["rms_norm_eps"]),
        ("phi3", ["rms_norm_eps"]),
        ("smollm3", ["use_sliding_window"]),
    ],
)
def test_absent_keys_have_the_defaults_of_the_family(
    family: str, keys: list[str], tmp_path: Path
) -> None:
    make_checkpoint(family, tmp_path)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({key: values[key] for key in values if key not in keys}))
    confirm_logprobs(tmp_path)


@pytest.mark.parametrize("kind", ["longrope", "yarn"])
def test_names_of_the_rotary_embedding_of_phi_3(kind: str, tmp_path: Path) -> None:
    make_checkpoint("phi4-mini", tmp_path, original_max_position_embeddings=128)
    path = tmp_path / "config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    scaling = {"type": kind} | {key: rope[key] for key in ("short_factor", "long_factor")}
    outer = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor")}
    path.write_text(json.dumps(values | outer | {"rope_scaling": scaling}))
    confirm_logprobs(tmp_path)


def confirm_logprobs(folder: Path) -> None:
    """Compare the probabilities after a prompt with those of transformers' model of the files."""
    prompt = [3 + (i * 37) % 190 for i in range(60)]
    engine = make_engine(folder, max_model_len=128)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
    engine.add_request(Request("0", prompt, params))
    (output,) = engine.step()
    (found,) = output.logprobs
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    wanted = expected[list(found.top_token_ids)].tolist()
    assert list(found.top_logprobs) == pytest.approx(wanted, abs=2e-4)

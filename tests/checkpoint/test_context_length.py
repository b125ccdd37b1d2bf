"""The longest sequence of a model, by the scaling of its rotary embedding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from encoders import encoder_engine, make_encoder
from oracle import Oracle, Work, make_engine, run, tokens_of
from transformers import AutoModelForCausalLM

from paged_backend.checkpoint.limits import MAX_POSITIONS
from paged_backend.checkpoint.model_config import load_model_config
from paged_backend.values.errors import ConfigError

LONG: Work = [([3 + (i * 37) % 190 for i in range(200)], 12)]


def edit(folder: Path, **values: Any) -> None:
    """Change config.json; None removes a key."""
    path = folder / "config.json"
    merged = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


YARN = {"factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTHS = {"max_position_embeddings": 2048, "original_max_position_embeddings": 512}
LONGROPE = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 4.0}


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    ("kind", "scaling", "positions", "length"),
    [
        ("yarn", YARN, 128, 512),  # as the cards of Qwen2.5 say
        ("yarn", YARN, 160, 512),  # Qwen3, whose positions include those of answers
        ("yarn", YARN, 512, 512),  # the positions are scaled already
        ("yarn", YARN, 600, 600),
        ("yarn", YARN, 100, 100),  # a limit below the trained length
        ("yarn", {"factor": 4.0}, 128, 512),
        ("yarn", YARN | {"factor": None}, 512, 512),  # the factor is 512 / 128
        ("yarn", YARN | {"factor": 2.5}, 128, 320),
        ("yarn", YARN | {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}, 128, 512),
        ("yarn", YARN | {"attention_factor": 1.2}, 128, 512),
        ("linear", {"factor": 4.0}, 128, 512),  # vicuna-7b-v1.5-16k
        ("linear", YARN, 512, 512),
        ("dynamic", {"factor": 4.0}, 128, 128),
        ("llama3", LLAMA3 | {"original_max_position_embeddings": 64}, 512, 512),
        ("longrope", LONGROPE | {"original_max_position_embeddings": 128}, 512, 512),
        ("su", LONGROPE | {"original_max_position_embeddings": 128}, 512, 512),
        ("default", {}, 128, 128),
    ],
)
def test_length_of_each_kind_of_scaling(
    kind: str,
    scaling: dict[str, Any],
    positions: int,
    length: int,
    place: str,
    key: str,
    tmp_path: Path,
) -> None:
    values = {
        "architectures": ["LlamaForCausalLM"],
        **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64),
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "max_position_embeddings": positions,
        place: {key: kind, **scaling},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_model_config(tmp_path).max_position_embeddings == length


@pytest.mark.parametrize(
    ("kinds", "length"),
    [
        ({"full_attention": {"rope_type": "yarn", **YARN}, "sliding_attention": {}}, 512),
        ({"full_attention": {}, "sliding_attention": {}}, 128),
    ],
)
def test_a_scaling_for_each_kind_of_attention(
    kinds: dict[str, Any], length: int, tmp_path: Path
) -> None:
    make_checkpoint("olmo3", tmp_path)
    ropes = {kind: {"rope_theta": 1000.0, **keys} for kind, keys in kinds.items()}
    edit(tmp_path, rope_parameters=ropes, max_position_embeddings=128)
    assert load_model_config(tmp_path).max_position_embeddings == length


def test_the_positions_of_gemma_3_include_the_scaling(tmp_path: Path) -> None:
    make_checkpoint("gemma3", tmp_path)
    scaling = {"rope_type": "linear", "factor": 8.0}
    edit(tmp_path, rope_parameters=None, rope_scaling=scaling)
    assert load_model_config(tmp_path).max_position_embeddings == 512


def test_a_factor_beyond_all_positions(tmp_path: Path) -> None:
    make_checkpoint("llama2", tmp_path)
    edit(tmp_path, rope_parameters={"rope_type": "linear", "factor": 2**20})
    with pytest.raises(ConfigError, match=f"factor must give at most {MAX_POSITIONS} tokens, got"):
        make_engine(tmp_path)


@pytest.mark.parametrize(
    ("family", "scaling"),
    [
        ("qwen2", {"type": "yarn", **YARN}),
        ("qwen3", {"rope_type": "yarn", **YARN, "attention_factor": 1.1}),
        ("llama2", {"type": "linear", "factor": 4.0}),
        ("cohere", {"type": "yarn", **YARN}),  # transformers computes it
        ("cohere", {"type": "linear", "factor": 4.0}),
    ],
)
def test_tokens_beyond_max_position_embeddings(
    family: str, scaling: dict[str, Any], tmp_path: Path
) -> None:
    rope = {"rope_theta": 10000.0, "rope_type": scaling.get("type"), **scaling}
    oracle = Oracle(family, tmp_path, max_position_embeddings=128, rope_parameters=rope)
    edit(tmp_path, rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    for options in ({}, {"max_model_len": 512}):
        engine = make_engine(tmp_path, **options)
        assert engine.executor.info.max_model_len == 512
        oracle.confirm(LONG, tokens_of(run(engine, LONG)))
    with pytest.raises(ConfigError, match="max_model_len must be at most 512"):
        make_engine(tmp_path, max_model_len=513)


@pytest.mark.parametrize("family", ["llama2", "cohere"])
def test_dynamic_scaling_within_the_trained_length(family: str, tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    oracle = Oracle(family, tmp_path, max_position_embeddings=212, rope_parameters=rope)
    engine = make_engine(tmp_path)
    assert engine.executor.info.max_model_len == 212
    oracle.confirm(LONG, tokens_of(run(engine, LONG)))
    with pytest.raises(ConfigError, match="max_model_len must be at most 212.*dynamic"):
        make_engine(tmp_path, max_model_len=213)


def test_longrope_ends_at_the_original_length_by_default(tmp_path: Path) -> None:
    oracle = Oracle("phi4-mini", tmp_path, **LENGTHS)
    engine = make_engine(tmp_path)
    assert engine.executor.info.max_model_len == 512
    oracle.confirm(LONG, tokens_of(run(engine, LONG)))
    with pytest.raises(ConfigError, match="max_model_len must be at most 2048"):
        make_engine(tmp_path, max_model_len=2049)


def test_the_long_frequencies_of_longrope(tmp_path: Path) -> None:
    oracle = Oracle("phi4-mini", tmp_path, **LENGTHS)
    work: Work = [([3 + (i * 37) % 190 for i in range(600)], 12)]
    engine = make_engine(tmp_path, max_model_len=2048)
    oracle.confirm(work, tokens_of(run(engine, work)))


def test_longrope_of_a_model_that_transformers_computes(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, **LONGROPE}
    rope |= {"original_max_position_embeddings": 256}
    oracle = Oracle("cohere", tmp_path, rope_parameters=rope)
    with pytest.raises(ConfigError, match="max_model_len must be at most 256 for Cohere.* got 512"):
        make_engine(tmp_path, max_model_len=512)
    engine = make_engine(tmp_path)
    assert engine.executor.info.max_model_len == 256
    oracle.confirm(LONG, tokens_of(run(engine, LONG)))


@pytest.mark.parametrize(
    ("family", "key", "name"),
    [
        ("llama2", "hidden_act", "swish"),
        ("mixtral", "hidden_act", "swish"),
        ("gemma2", "hidden_activation", "gelu_new"),
        ("gemma2", "hidden_activation", "gelu_fast"),
        ("gemma3", "hidden_activation", "gelu_python_tanh"),
        ("gemma3", "hidden_activation", "gelu_accurate"),
    ],
)
def test_other_names_of_an_activation(family: str, key: str, name: str, tmp_path: Path) -> None:
    oracle = Oracle(family, tmp_path, **{key: name})
    assert json.loads((tmp_path / "config.json").read_text())[key] == name
    work: Work = [(LONG[0][0][:40], 12)]
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))


@pytest.mark.parametrize(
    ("family", "values"),
    [
        ("llama2", {"hidden_act": "gelu"}),
        ("qwen2", {"hidden_act": "relu"}),
        ("gemma2", {"hidden_activation": "gelu"}),
        ("gemma3", {"hidden_activation": "gelu"}),
        ("llama2", {"partial_rotary_factor": 0.5}),
        ("smollm3", {"partial_rotary_factor": 0.5}),
    ],
)
def test_settings_that_only_transformers_computes(
    family: str, values: dict[str, Any], tmp_path: Path
) -> None:
    oracle = Oracle(family, tmp_path, **values)
    work: Work = [(LONG[0][0][:40], 12)]
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))
    key = next(iter(values))
    with pytest.raises(ConfigError, match=key):
        make_engine(tmp_path, model_impl="paged")


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3"])
@pytest.mark.parametrize("own", [None, "gelu_pytorch_tanh", "gelu"])
def test_the_older_key_of_gemma(family: str, own: str | None, tmp_path: Path) -> None:
    oracle = Oracle(family, tmp_path)
    edit(tmp_path, hidden_act="gelu", hidden_activation=own)
    oracle.model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    work: Work = [(LONG[0][0][:40], 12)]
    oracle.confirm(work, tokens_of(run(make_engine(tmp_path), work)))


@pytest.mark.parametrize(
    ("length", "kind", "expected"),
    [(40, "absolute", 40), (10**30, "absolute", 96), (40, None, 96), (4000, "absolute", 96)],
)
def test_encoders_end_where_their_tokenizers_do(
    length: int, kind: str | None, expected: int, tmp_path: Path
) -> None:
    make_encoder("bert", tmp_path)
    edit(tmp_path, position_embedding_type=kind)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": length}))
    assert encoder_engine(tmp_path).executor.info.max_model_len == expected

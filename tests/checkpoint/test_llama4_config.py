"""Keys of config.json of Llama 4: kinds of layers, chunks, experts, and factors on queries."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.factors import QueryGrowth
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.values.errors import ConfigError
from paged_backend.values.windows import Chunks

VALUES: dict[str, Any] = {
    "architectures": ["Llama4ForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "max_position_embeddings": 512,
}
FULL, CHUNKED = "full_attention", "chunked_attention"


def shape(**values: Any) -> ModelShape:
    return read_shape(ConfigFile(VALUES | values, "config.json"))


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    found, known = shape(), AutoConfig.for_model("llama4_text", **VALUES)
    assert found.windows == (Chunks(known.attention_chunk_size),) * 3 + (None,)
    assert [found.variant.is_rotated(layer) for layer in range(4)] == known.no_rope_layers
    assert found.intermediate_size == known.intermediate_size_mlp
    assert (found.num_kv_heads, found.head_dim) == (known.num_key_value_heads, known.head_dim)
    growth = QueryGrowth(known.attn_scale, known.floor_scale, first=1, only_unrotated=True)
    assert found.variant.query_growth == growth
    moe = found.moe
    assert moe is not None and moe.shared_expert is not None
    assert moe.intermediate_size == moe.shared_expert.intermediate_size == known.intermediate_size
    assert moe.num_experts == known.num_local_experts
    assert moe.routing.num_experts_per_tok == known.num_experts_per_tok


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        ({}, [0, 1, 2, 3]),
        ({"interleave_moe_layer_step": 2}, [1, 3]),
        ({"interleave_moe_layer_step": 3}, [2]),
        ({"moe_layers": [0, 3]}, [0, 3]),
        ({"moe_layers": []}, []),
    ],
)
def test_layers_with_experts(values: dict[str, Any], layers: list[int]) -> None:
    found = shape(**values)
    assert [layer for layer in range(4) if found.moe_of(layer) is not None] == layers
    assert list(AutoConfig.for_model("llama4_text", **VALUES, **values).moe_layers) == layers


def test_windows_follow_the_kinds_of_layers() -> None:
    chunks = Chunks(8)
    some = shape(attention_chunk_size=8, no_rope_layers=[0, 1, 1, 0])
    assert some.windows == (None, chunks, chunks, None)
    assert shape(no_rope_layers=[]).windows == shape().windows
    assert shape(attention_chunk_size=None).windows == (None,) * 4
    kinds = [CHUNKED, FULL, FULL, CHUNKED]
    named = shape(attention_chunk_size=8, layer_types=kinds)
    assert named.windows == (chunks, None, None, chunks)


@pytest.mark.parametrize(("value", "has_growth"), [(True, True), (False, False), (4, True)])
def test_the_flag_for_factors_on_queries(value: object, has_growth: bool) -> None:
    """Older versions of transformers wrote it as a number."""
    growth = shape(attn_temperature_tuning=value).variant.query_growth
    assert (growth is not None) is has_growth


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention_chunk_size": 0}, "attention_chunk_size must be an integer from 1"),
        (
            {"attention_chunk_size": None, "layer_types": [CHUNKED] * 4},
            "attention_chunk_size is null, but layer_types has chunked_attention",
        ),
        (
            {"layer_types": ["sliding_attention"] * 4},
            "layer_types holds 'sliding_attention'; known: full_attention, chunked_attention",
        ),
        ({"no_rope_layers": [1, 2, 0, 1]}, "no_rope_layers must be a list of 4 numbers, 0 or 1"),
        ({"moe_layers": 2}, "moe_layers must be a list of integers, got 2"),
        ({"num_experts_per_tok": 17}, "num_experts_per_tok must be an integer from 1 up to 16"),
        ({"attn_temperature_tuning": "on"}, "attn_temperature_tuning must be true or false"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
            "rope_type must be one of default, dynamic, linear, llama3 with use_qk_norm, "
            "got 'yarn'",
        ),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape(**values)

"""Keys of config.json of models whose layers have several shapes: Gemma 4."""

from __future__ import annotations

from typing import Any

import pytest

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.layer_sizes import LayerSizes
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.shape_reader import read_shape
from paged_backend.values.errors import ConfigError

VALUES: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "max_position_embeddings": 512,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 199,
}
LARGER = {"head_dim": 32, "num_key_value_heads": 1}


def shape(**values: Any) -> ModelShape:
    return read_shape(ConfigFile(VALUES | values, "config.json"))


def test_layers_share_with_the_last_one_of_their_kind() -> None:
    assert shape().variant.layers == (
        LayerSizes(2, 16, 96),
        LayerSizes(2, 32, 96),
        LayerSizes(2, 16, 192, shared_with=0),
        LayerSizes(2, 32, 192, shared_with=1),
    )
    assert shape().keeping_layers == (0, 1)
    assert shape().attention_windows == (20, None, 20, None)


def test_both_ways_of_writing_the_heads_of_full_attention() -> None:
    fewer = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
    new = shape(attention_k_eq_v=True, per_layer_config={"1": LARGER, "3": LARGER})
    assert shape(**fewer).variant.layers == new.variant.layers
    assert new.variant.layers[1] == LayerSizes(1, 32, 96, keys_as_values=True)


def test_the_last_layer_sees_everything_as_in_transformers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"]
    assert shape(layer_types=kinds).windows == (20, None, 20, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"enable_moe_block": True}, "num_experts is missing"),
        (
            {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5},
            "top_k_experts must be an integer from 1 up to 4, got 5",
        ),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is all, which"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers must be an integer from 0 up to 4"),
        ({"num_kv_shared_layers": 3}, "num_kv_shared_layers is 3, so that no layer keeps keys"),
        (
            {"vocab_size_per_layer_input": 198},
            r"vocab_size_per_layer_input \(198\) must be",
        ),
        ({"global_head_dim": 33}, "global_head_dim must be even, got 33"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide num_attention_heads"),
        (
            {"per_layer_config": {"1": {"num_attention_heads": 8}}},
            "per_layer_config: 1: num_attention_heads is 8, which is not supported",
        ),
        ({"per_layer_config": {"1": 7}}, "per_layer_config: 1 must be an object, got 7"),
        (
            {"per_layer_config": {"1": LARGER}},
            "num_kv_shared_layers lets layer 3 read keys and values of layer 1, which has other",
        ),
    ],
)
def test_a_wrong_key_is_named_with_its_file(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"config.json: {message}"):
        shape(**values)

"""Layers that a configuration of GPTQ chooses, and their formats, where no files say more."""

from __future__ import annotations

from typing import Any

import pytest

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.quantization.formats import EMBEDDING
from paged_backend.quantization.gptq_awq import read_gptq
from paged_backend.quantization.packed import GptqFormat

DEFAULT = GptqFormat(4, 16, 1)
MLP, ATTENTION = "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"


def quantization(**values: Any) -> Any:
    return read_gptq(ConfigFile({"bits": 4, "group_size": 16} | values, "config.json"))


@pytest.mark.parametrize(
    ("values", "layer", "wanted"),
    [
        ({}, MLP, DEFAULT),
        ({}, "lm_head", None),
        ({"lm_head": True}, "lm_head", DEFAULT),
        ({"lm_head": True}, EMBEDDING, None),
        ({"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, ATTENTION, DEFAULT),
        ({"modules_in_block_to_quantize": [["self_attn.q_proj"]]}, MLP, None),
        ({"modules_in_block_to_quantize": ["mlp.up_proj"]}, MLP, DEFAULT),
        ({"modules_to_not_convert": ["mlp"]}, MLP, None),
        ({"modules_to_not_convert": ["mlp"]}, ATTENTION, DEFAULT),
        ({"dynamic": {r"-:.*mlp": {}}}, MLP, None),
        ({"dynamic": {r".*mlp": {"bits": 8}}}, MLP, GptqFormat(8, 16, 1)),
        ({"dynamic": {r".*mlp": {"bits": 8, "group_size": -1}}}, MLP, GptqFormat(8, 0, 1)),
        ({"dynamic": {r"+:.*mlp": {"group_size": 32}}}, MLP, GptqFormat(4, 32, 1)),
        ({"dynamic": {r".*mlp": {"bits": 8}}}, ATTENTION, DEFAULT),
        ({"checkpoint_format": "gptq_v2"}, MLP, GptqFormat(4, 16, 0)),
    ],
)
def test_layers_that_are_chosen(
    values: dict[str, Any], layer: str, wanted: GptqFormat | None
) -> None:
    assert quantization(**values).format_of(layer) == wanted


def test_a_layer_that_is_stored_in_spite_of_the_lists_has_the_format_of_its_override() -> None:
    dynamic = {r"-:.*mlp": {}, r".*q_proj": {"bits": 8}}
    found = quantization(dynamic=dynamic, modules_to_not_convert=["self_attn"])
    assert found.converted(MLP) == DEFAULT
    assert found.converted(ATTENTION) == GptqFormat(8, 16, 1)
    assert found.converted("lm_head") == DEFAULT

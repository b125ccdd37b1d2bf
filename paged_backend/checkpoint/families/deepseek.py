"""DeepSeek V2 and V3, and GLM-4 MoE Lite: latent attention, and experts in most layers."""

from __future__ import annotations

import math
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.context_length import rope_type
from paged_backend.checkpoint.families.keys import attention_biases, rope_section
from paged_backend.checkpoint.latent import LatentShape
from paged_backend.checkpoint.limits import MAX_HEAD_DIM, MAX_HIDDEN_SIZE, MAX_LAYERS
from paged_backend.checkpoint.moe import MoeShape
from paged_backend.checkpoint.moe_reader import read_deepseek_v2, read_deepseek_v3
from paged_backend.checkpoint.shape import Biases, Rotary, Variant
from paged_backend.values.validation import shorten

_DENSE, _SPARSE = "dense", "sparse"


def deepseek_v2(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a DeepSeek V2 checkpoint."""
    if config.flag("mlp_bias", False):
        raise config.error("mlp_bias", "is true, which is not supported")
    return _variant(config, num_layers, read_deepseek_v2(config), after_dense(config, num_layers))


def deepseek_v3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a DeepSeek V3 checkpoint."""
    interleaved = config.flag("rope_interleave", True)
    layers = after_dense(config, num_layers)
    return _variant(config, num_layers, read_deepseek_v3(config), layers, interleaved)


def glm4_moe_lite(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a GLM-4 MoE Lite checkpoint."""
    interleaved = config.flag("rope_interleave", True)
    layers = sparse_layers(config, num_layers)
    return _variant(config, num_layers, read_deepseek_v3(config), layers, interleaved)


def read_latent(config: ConfigFile) -> LatentShape:
    """Read the sizes of latent attention.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    rotary_dim = config.integer("qk_rope_head_dim", high=MAX_HEAD_DIM)
    if rotary_dim % 2:
        raise config.error("qk_rope_head_dim", f"must be even, got {rotary_dim}")
    has_query_rank = config.value("q_lora_rank") is not None
    if not has_query_rank and config.flag("attention_bias", False):
        problem = "is true, which is not supported without q_lora_rank"
        raise config.error("attention_bias", problem)
    return LatentShape(
        rank=config.integer("kv_lora_rank", high=MAX_HEAD_DIM),
        rotary_dim=rotary_dim,
        plain_dim=config.integer("qk_nope_head_dim", high=MAX_HEAD_DIM),
        value_dim=config.integer("v_head_dim", high=MAX_HEAD_DIM),
        query_rank=config.integer("q_lora_rank", high=MAX_HIDDEN_SIZE) if has_query_rank else None,
    )


def latent_scale(config: ConfigFile, latent: LatentShape) -> float:
    """Read the factor on the scores, which YaRN's ``mscale_all_dim`` makes larger."""
    scale = 1 / math.sqrt(latent.query_dim)
    section = rope_section(config)
    if rope_type(section) == "default" or not section.value("mscale_all_dim"):
        return scale
    factor = section.number("factor")
    growth = 0.1 * section.number("mscale_all_dim") * math.log(factor) + 1 if factor > 1 else 1.0
    return scale * growth * growth


def _variant(
    config: ConfigFile,
    num_layers: int,
    moe: MoeShape,
    moe_layers: tuple[bool, ...],
    interleaved: bool = True,
) -> Variant:
    latent, biases = read_latent(config), attention_biases(config)
    return Variant(
        biases=Biases(qkv=biases.qkv, output=biases.output),
        rotary=Rotary(interleaved=interleaved),
        latent=latent,
        attention_scale=latent_scale(config, latent),
        moe=moe if any(moe_layers) else None,
        moe_layers=moe_layers if any(moe_layers) else (),
        prediction_layers=prediction_layers(config),
    )


def after_dense(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have experts: all after the first ones."""
    if config.value("moe_layer_freq") not in (None, 1):
        frequency = shorten(config.value("moe_layer_freq"))
        raise config.error("moe_layer_freq", f"is not supported unless it is 1, got {frequency}")
    first = config.integer("first_k_dense_replace", 0, low=0)
    return tuple(layer >= first for layer in range(num_layers))


def prediction_layers(config: ConfigFile) -> int:
    """Read the number of MTP layers, which are stored after the last layer."""
    return config.integer("num_nextn_predict_layers", 0, low=0, high=MAX_LAYERS)


def sparse_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have experts, by the names of the layers; all but the first by default."""
    kinds: Any = config.value("mlp_layer_types")
    if kinds is None:
        return tuple(layer > 0 for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.error("mlp_layer_types", f"must be a list of {num_layers} strings")
    for kind in kinds:
        if kind not in (_DENSE, _SPARSE):
            raise config.error(
                "mlp_layer_types", f"holds {shorten(kind)}; known: {_DENSE}, {_SPARSE}"
            )
    return tuple(kind == _SPARSE for kind in kinds)

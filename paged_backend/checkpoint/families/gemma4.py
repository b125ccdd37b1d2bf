"""Gemma 4: layers with full attention have other heads, and some layers share keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.gemma import NORMS
from paged_backend.checkpoint.families.keys import (
    FULL,
    SLIDING,
    attention_biases,
    last_of_each,
    layer_types,
    rotary_by_kind,
    windows_of,
)
from paged_backend.checkpoint.layer_sizes import LayerInputs, LayerSizes
from paged_backend.checkpoint.limits import MAX_HEAD_DIM, MAX_HEADS
from paged_backend.checkpoint.moe_reader import read_gemma4
from paged_backend.checkpoint.shape import Activation, QKNormScope, Rotary, Variant
from paged_backend.values.validation import shorten

_ROPES: dict[str, dict[str, Any]] = {
    FULL: {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
    SLIDING: {"rope_theta": 10_000.0},
}


def gemma4(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Gemma 4 checkpoint."""
    if config.value("use_bidirectional_attention") == "all":
        raise config.error("use_bidirectional_attention", "is all, which is not supported")
    kinds = layer_types(config, last_of_each(6, num_layers))
    kinds = (*kinds[:-1], FULL)  # as in transformers, whatever the file says
    moe = read_gemma4(config) if config.flag("enable_moe_block", False) else None
    return Variant(
        biases=attention_biases(config),
        windows=windows_of(config, kinds, default=512),
        norms=NORMS if moe is None else replace(NORMS, mlp_input=None),
        qk_norm=QKNormScope.HEAD,
        value_norm=True,
        activation=Activation.GELU_TANH,
        rotary=_rotary(config, kinds),
        embedding_scale=config.integer("hidden_size") ** 0.5,
        attention_scale=1.0,
        logits_softcap=config.optional_number("final_logit_softcapping"),
        layers=_layers(config, kinds),
        layer_inputs=_layer_inputs(config),
        layer_scalars=True,
        moe=moe,
    )


def _rotary(config: ConfigFile, kinds: tuple[str, ...]) -> Rotary:
    older = {kind: config.with_only().with_defaults(**keys) for kind, keys in _ROPES.items()}
    rotary = rotary_by_kind(config, kinds, older)
    return Rotary(rotary.sections, within_positions=True)


def _layer_inputs(config: ConfigFile) -> LayerInputs | None:
    if config.value("hidden_size_per_layer_input") == 0:
        return None
    vocab_size = config.integer("vocab_size_per_layer_input", 262_144)
    if vocab_size < config.integer("vocab_size"):
        raise config.error(
            "vocab_size_per_layer_input", f"({vocab_size}) must be at least vocab_size"
        )
    return LayerInputs(vocab_size, config.integer("hidden_size_per_layer_input", 256))


def _layers(config: ConfigFile, kinds: tuple[str, ...]) -> tuple[LayerSizes, ...]:
    num_layers = len(kinds)
    inner = config.integer("intermediate_size")
    wide = config.flag("use_double_wide_mlp", False)
    as_values = config.flag("attention_k_eq_v", False)
    num_sharing = config.integer("num_kv_shared_layers", 0, low=0, high=num_layers)
    first_sharing = num_layers - num_sharing
    layers: list[LayerSizes] = []
    for layer, kind in enumerate(kinds):
        heads = _heads(config, layer, kind)
        keeper = None
        if layer >= first_sharing:
            same = [other for other in range(first_sharing) if kinds[other] == kind]
            if not same:
                raise config.error(
                    "num_kv_shared_layers",
                    f"is {num_sharing}, so that no layer keeps keys and values for the kind of "
                    f"attention {kind}",
                )
            keeper = same[-1]
            if heads != (layers[keeper].head_dim, layers[keeper].num_kv_heads):
                raise config.error(
                    "num_kv_shared_layers",
                    f"lets layer {layer} read keys and values of layer {keeper}, which has other "
                    "heads",
                )
        sizes = LayerSizes(
            heads[1],
            heads[0],
            inner * (2 if wide and keeper is not None else 1),
            shared_with=keeper,
            keys_as_values=as_values and kind == FULL and keeper is None,
        )
        layers.append(sizes)
    return tuple(layers)


def _heads(config: ConfigFile, layer: int, kind: str) -> tuple[int, int]:
    """Read the size of a layer's heads, and the number of its heads of keys and values.

    transformers 5 writes what differs into ``per_layer_config``; older files have two keys for the
    layers with full attention.
    """
    overrides, names = config.section("per_layer_config"), ("head_dim", "num_key_value_heads")
    if overrides is not None:
        section = overrides.section(str(layer)) or overrides.with_only()
        for key in section.keys():
            if key not in names:
                problem = f"is {shorten(section.value(key))}, which is not supported"
                raise section.error(key, problem)
        config = section.with_defaults(
            num_attention_heads=config.value("num_attention_heads"),
            **{key: config.value(key) for key in names},
        )
    elif kind == FULL:
        config = config.with_defaults(global_head_dim=512)
        is_fewer = config.flag("attention_k_eq_v", False)
        is_fewer = is_fewer and config.value("num_global_key_value_heads") is not None
        names = "global_head_dim", "num_global_key_value_heads" if is_fewer else names[1]
    head_dim = config.integer(names[0], 256, high=MAX_HEAD_DIM)
    if head_dim % 2:
        raise config.error(names[0], f"must be even, got {head_dim}")
    num_heads = config.integer("num_attention_heads", high=MAX_HEADS)
    num_kv_heads = config.integer(names[1], 4, high=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise config.error(
            names[1], f"({num_kv_heads}) must divide num_attention_heads ({num_heads})"
        )
    return head_dim, num_kv_heads

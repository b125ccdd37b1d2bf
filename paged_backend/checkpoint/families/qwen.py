"""Qwen 2 and 3, with and without experts."""

from __future__ import annotations

from dataclasses import replace

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import (
    FULL,
    LINEAR,
    SLIDING,
    attention_biases,
    layer_types,
    one_window,
    rotary_dim,
    windows_of,
)
from paged_backend.checkpoint.limits import MAX_LAYERS
from paged_backend.checkpoint.mixers import DeltaLayout, DeltaShape
from paged_backend.checkpoint.moe import MoeShape
from paged_backend.checkpoint.moe_reader import read_qwen2_moe, read_qwen3_moe
from paged_backend.checkpoint.shape import Biases, QKNormScope, Rotary, Variant, Windows
from paged_backend.values.validation import shorten


def qwen2(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Qwen 2 checkpoint."""
    return Variant(biases=Biases(qkv=True), windows=_windows(config, num_layers))


def qwen3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Qwen 3 checkpoint."""
    windows = _windows(config, num_layers)
    return Variant(biases=attention_biases(config), windows=windows, qk_norm=QKNormScope.HEAD)


def qwen2_moe(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Qwen 2 checkpoint with experts."""
    return Variant(
        biases=Biases(qkv=config.flag("qkv_bias", True)),
        windows=_windows(config, num_layers),
        moe=read_qwen2_moe(config),
        moe_layers=_moe_layers(config, num_layers),
    )


def qwen3_moe(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Qwen 3 checkpoint with experts."""
    has_window = config.flag("use_sliding_window", False)
    return Variant(
        biases=attention_biases(config),
        windows=one_window(config, num_layers, default=4096) if has_window else (),
        qk_norm=QKNormScope.HEAD,
        moe=read_qwen3_moe(config),
        moe_layers=_moe_layers(config, num_layers),
    )


def qwen3_next(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Qwen3-Next checkpoint, with linear attention in most layers."""
    return replace(
        _hybrid(config, num_layers, DeltaLayout.FUSED),
        moe=_shared_moe(config),
        moe_layers=_moe_layers(config, num_layers),
    )


def qwen3_5(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of the decoder of a Qwen 3.5 checkpoint."""
    return _hybrid(config, num_layers, DeltaLayout.SECTIONS)


def qwen3_5_moe(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of the decoder of a Qwen 3.5 checkpoint with experts."""
    return replace(_hybrid(config, num_layers, DeltaLayout.SECTIONS), moe=_shared_moe(config))


def _hybrid(config: ConfigFile, num_layers: int, layout: DeltaLayout) -> Variant:
    """Read a variant with linear attention, by the gated delta rule, in most layers."""
    defaults = {
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
    shape = read_delta(config.with_defaults(**defaults), layout)
    period = config.integer("full_attention_interval", 4)
    default = tuple(FULL if layer % period == period - 1 else LINEAR for layer in range(num_layers))
    kinds = layer_types(config, default, known=(FULL, LINEAR))
    dim = rotary_dim(config, config.integer("head_dim", 256), default=0.25)
    return Variant(
        biases=attention_biases(config),
        unit_offset=True,
        qk_norm=QKNormScope.HEAD,
        rotary=Rotary(dim=dim),
        state_mixers=tuple(shape if kind == LINEAR else None for kind in kinds),
        gated_attention=True,
        prediction_layers=_prediction_layers(config),
        prediction_module="mtp",
    )


def _prediction_layers(config: ConfigFile) -> int:
    """Read the number of MTP layers that share the embedding of the model.

    Published files of Qwen3-Next have one, and no key for it.
    """
    if config.flag("mtp_use_dedicated_embeddings", False):
        return 0
    return config.integer("mtp_num_hidden_layers", 1, low=0, high=MAX_LAYERS)


def read_delta(config: ConfigFile, layout: DeltaLayout) -> DeltaShape:
    """Read the sizes of linear attention by the gated delta rule.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    shape = DeltaShape(
        hidden_size=config.integer("hidden_size"),
        num_key_heads=config.integer("linear_num_key_heads"),
        num_value_heads=config.integer("linear_num_value_heads"),
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        width=config.integer("linear_conv_kernel_dim", 4, low=2),
        layout=layout,
    )
    if shape.num_value_heads % shape.num_key_heads:
        raise config.error(
            "linear_num_value_heads",
            f"must be a multiple of linear_num_key_heads ({shape.num_key_heads}), got "
            f"{shape.num_value_heads}",
        )
    return shape


def _shared_moe(config: ConfigFile) -> MoeShape:
    """Read experts with a shared one, with weights that sum up to 1 by default."""
    moe = read_qwen2_moe(config)
    norm_topk_prob = config.flag("norm_topk_prob", True)
    return replace(moe, routing=replace(moe.routing, norm_topk_prob=norm_topk_prob))


def _moe_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have experts; all other layers have an MLP."""
    dense = config.value("mlp_only_layers") or []
    is_list = isinstance(dense, list) and len(dense) <= num_layers
    if not is_list or not all(type(layer) is int for layer in dense):
        raise config.error("mlp_only_layers", f"must be a list of integers, got {shorten(dense)}")
    step = config.integer("decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


def _windows(config: ConfigFile, num_layers: int) -> Windows:
    if not config.flag("use_sliding_window", False):
        return ()
    first = config.integer("max_window_layers", 28, low=0)
    default = tuple(SLIDING if layer >= first else FULL for layer in range(num_layers))
    return windows_of(config, layer_types(config, default), default=4096)

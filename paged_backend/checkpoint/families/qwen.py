"""Qwen 2 and 3, with and without experts."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import (
    FULL,
    SLIDING,
    attention_biases,
    layer_types,
    one_window,
    windows_of,
)
from paged_backend.checkpoint.moe_reader import read_qwen2_moe, read_qwen3_moe
from paged_backend.checkpoint.shape import Biases, QKNormScope, Variant, Windows
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

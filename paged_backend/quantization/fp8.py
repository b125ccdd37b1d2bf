"""Reads the quantization_config of FP8 checkpoints: DeepSeek's and Qwen's, and ModelOpt's."""

from __future__ import annotations

import torch

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import MAX_GROUP_SIZE
from paged_backend.quantization.formats import BLOCKS, Quantization, WeightFormat
from paged_backend.quantization.kv_cache import read_kv_cache_dtype
from paged_backend.quantization.layer_names import LayerNames
from paged_backend.quantization.plain import PlainFormat
from paged_backend.values.validation import shorten

_FP8 = torch.float8_e4m3fn
_MODELOPT = {"FP8": (0, 0), "FP8_PER_CHANNEL_PER_TOKEN": (1, 0)}  # the blocks with one scale


def read_fp8(config: ConfigFile) -> Quantization:
    """Read which layers are quantized, and how.

    Raises:
        ConfigError: a key is missing or wrong, or the variant is not supported.
    """
    config.text("fmt", "e4m3", ("e4m3",))
    weight_format = PlainFormat(_FP8, (0, 0), rounds_inputs=True)
    sizes = config.value("weight_block_size")
    if sizes is not None:
        if not (isinstance(sizes, list) and len(sizes) == 2 and all(_is_size(s) for s in sizes)):
            raise config.error("weight_block_size", f"must hold two sizes, got {shorten(sizes)}")
        block = sizes[0], sizes[1]
        weight_format = PlainFormat(_FP8, block, "weight_scale_inv", rounds_inputs=True)
    key = "ignored_layers" if config.value("ignored_layers") else "modules_to_not_convert"
    skipped = LayerNames.read_parts(config, key)
    return _all_but("fp8", skipped, weight_format, read_kv_cache_dtype(config))


def read_modelopt(config: ConfigFile) -> Quantization:
    """Read which layers are quantized, and how, from either file that ModelOpt writes.

    Raises:
        ConfigError: a key is missing or wrong, or the algorithm is not supported.
    """
    section = config.section("quantization") or config  # section of hf_quant_config.json
    kv_cache_dtype = read_kv_cache_dtype(section)
    if section.value("quant_algo") is None and kv_cache_dtype != "auto":
        return Quantization("modelopt", lambda layer: None, kv_cache_dtype)
    algorithm = section.text("quant_algo", "").upper()
    if algorithm not in _MODELOPT:
        raise section.error(
            "quant_algo", f"is {shorten(algorithm)}; supported: {', '.join(_MODELOPT)}"
        )
    weight_format = PlainFormat(_FP8, _MODELOPT[algorithm], rounds_inputs=True)
    key = "exclude_modules" if "exclude_modules" in section else "ignore"
    skipped = LayerNames.read_wildcards(section, key)
    return _all_but("modelopt", skipped, weight_format, kv_cache_dtype)


def _all_but(
    method: str, skipped: LayerNames, weight_format: WeightFormat, kv_cache_dtype: str
) -> Quantization:
    def format_of(layer: str) -> WeightFormat | None:
        return weight_format if layer.startswith(BLOCKS) and layer not in skipped else None

    return Quantization(method, format_of, kv_cache_dtype, converted=lambda layer: weight_format)


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= MAX_GROUP_SIZE

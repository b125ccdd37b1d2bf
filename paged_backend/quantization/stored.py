"""Compares what a quantization_config says about layers with the tensors that the files hold.

Tools write the lists of layers that are quantized, or not, in many ways: whole names, parts of
names, expressions, groups of modules of one block, or nothing. The tensors of a layer decide it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.safetensors_files import Header, has_weights, read_headers
from paged_backend.checkpoint.tensor_names import usual_name
from paged_backend.quantization.formats import Quantization, WeightFormat
from paged_backend.quantization.plain import PlainFormat

_FLOATS = ("F64", "F32", "F16", "BF16")
_PACKED = ("qweight", "weight_packed")
_SCALES = ("weight_scale", "weight_scale_inv")

Headers = Mapping[str, Header]
FusedLayers = Mapping[str, tuple[int, ...]]
"""The shares of the rows of fused layers that each of their parts has, by the layers' names."""


def stored_headers(folder: Path) -> Headers:
    """Read the headers of a checkpoint's tensors, by their usual names; empty without weights.

    Raises:
        ConfigError: a file is missing or damaged.
    """
    return usual_headers(folder) if has_weights(folder) else {}


def usual_headers(folder: Path) -> Headers:
    """Read the headers of a checkpoint's tensors, by their usual names.

    Raises:
        ConfigError: there are no files of weights, or one is missing or damaged.
    """
    return {usual_name(name): header for name, header in read_headers(folder).items()}


def holds_quantized(headers: Headers) -> bool:
    """Return whether any layer of a checkpoint is quantized."""
    return any(_is_quantized(headers, name.rpartition(".")[0]) for name in headers)


def fused_layers(config: ConfigFile) -> FusedLayers:
    """Read the shares of queries, keys and values, and of gate and up, from a config.json.

    Raises:
        ConfigError: a number of heads is wrong.
    """
    heads = config.integer("num_attention_heads", 1)
    kv_heads = config.integer("num_key_value_heads", heads)
    return {"qkv_proj": (heads, kv_heads, kv_heads), "gate_up_proj": (1, 1)}


def as_stored(quantization: Quantization, headers: Headers, fused: FusedLayers) -> Quantization:
    """Return the quantization with the layers quantized that the files hold as such.

    Layers of which the files hold nothing stay as the configuration says.

    Args:
        quantization: what the configuration says.
        headers: headers of the files.
        fused: layers with parts that may have scales of their own.
    """

    def format_of(layer: str) -> WeightFormat | None:
        if _is_float(headers, layer):
            return None
        weight_format = quantization.format_of(layer)
        if weight_format is None and _is_quantized(headers, layer):
            weight_format = quantization.converted(layer)
        if isinstance(weight_format, PlainFormat):
            return _with_scales(weight_format, headers, layer, fused)
        return weight_format

    return replace(quantization, format_of=format_of)


def _is_float(headers: Headers, layer: str) -> bool:
    header = headers.get(f"{layer}.weight")
    packed = any(f"{layer}.{suffix}" in headers for suffix in _PACKED)
    return header is not None and header.dtype in _FLOATS and not packed


def _is_quantized(headers: Headers, layer: str) -> bool:
    if any(f"{layer}.{suffix}" in headers for suffix in _PACKED):
        return True
    header = headers.get(f"{layer}.weight")
    return header is not None and header.dtype not in _FLOATS


def _with_scales(
    weight_format: PlainFormat, headers: Headers, layer: str, fused: FusedLayers
) -> PlainFormat:
    """Return the format with a scale for each row or part, if that is what the files hold.

    The configuration tells neither from one scale.
    """
    weight = headers.get(f"{layer}.weight")
    scales = (headers.get(f"{layer}.{suffix}") for suffix in _SCALES)
    scale = next(filter(None, scales), None)
    if weight is None or scale is None or weight_format.block != (0, 0):
        return weight_format
    rows = weight.shape[0] if weight.shape else 0
    sizes = [size for size in scale.shape if size != 1]
    if sizes == [rows]:
        return replace(weight_format, block=(1, 0))
    shares = fused.get(layer.rpartition(".")[2], ())
    if shares and sizes == [len(shares)] and rows % sum(shares) == 0:
        parts = tuple(rows // sum(shares) * share for share in shares)
        return replace(weight_format, block=(1, 0), parts=parts)
    return weight_format

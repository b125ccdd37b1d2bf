"""Reads the quantization_config of compressed-tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import MAX_GROUP_SIZE, MAX_PATTERNS
from paged_backend.quantization.formats import EMBEDDING, Quantization, WeightFormat
from paged_backend.quantization.kv_cache import read_kv_cache_dtype
from paged_backend.quantization.layer_names import LayerNames
from paged_backend.quantization.packed import PackQuantizedFormat
from paged_backend.quantization.patterns import PatternMatcher
from paged_backend.quantization.plain import PlainFormat
from paged_backend.values.validation import shorten

_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = (*_PLAIN, "pack-quantized", "dense")
_STRATEGIES = ("tensor", "channel", "group", "block")
_CLASS = "Linear"  # a target that stands for all linear layers


@dataclass(frozen=True, slots=True)
class _Group:
    targets: LayerNames
    weights: WeightFormat | None


def read_compressed_tensors(config: ConfigFile) -> Quantization:
    """Read which layers are quantized, and how.

    Raises:
        ConfigError: a key is missing or wrong, or the format is not supported.
    """
    for key in ("transform_config", "sparsity_config"):
        if config.section(key) is not None:
            raise config.error(key, "is set, which is not supported")
    matcher = PatternMatcher()
    groups = _groups(config, matcher)
    ignore = LayerNames.read(config, "ignore", matcher)

    def format_of(layer: str) -> WeightFormat | None:
        if layer == EMBEDDING or layer in ignore:
            return None
        # The names of layers count more than the class of layers.
        chosen = [group for group in groups if layer in group.targets] or [
            group for group in groups if _CLASS in group.targets
        ]
        return chosen[0].weights if chosen else None

    return Quantization("compressed-tensors", format_of, read_kv_cache_dtype(config))


def _groups(config: ConfigFile, matcher: PatternMatcher) -> list[_Group]:
    key = "config_groups"
    section = config.section(key)
    if section is None:
        if config.value(key) == {}:  # only keys and values are quantized
            return []
        raise config.error(key, "is missing; it must be an object of groups")
    if len(list(section.keys())) > MAX_PATTERNS:
        raise config.error(key, f"must have at most {MAX_PATTERNS} groups")
    default = config.text("format", "dense")
    return [_group(section, name, default, matcher) for name in section.keys()]


def _group(groups: ConfigFile, name: str, default_format: str, matcher: PatternMatcher) -> _Group:
    group = groups.section(name)
    if group is None:
        raise groups.error(name, "must be an object with targets and weights")
    stored = group.text("format", default_format)
    if stored not in _FORMATS:
        raise group.error("format", f"is {shorten(stored)}; supported: {', '.join(_FORMATS)}")
    weights = group.section("weights")
    weight_format = None
    if weights is not None and stored != "dense":
        inputs = group.section("input_activations")
        weight_format = _weight_format(weights, inputs, stored)
    return _Group(LayerNames.read(group, "targets", matcher), weight_format)


def _weight_format(weights: ConfigFile, inputs: ConfigFile | None, stored: str) -> WeightFormat:
    kind = weights.text("type", "int", ("int", "float"))
    bits = weights.integer("num_bits", 8)
    strategy = weights.text("strategy", "tensor", _STRATEGIES)
    symmetric = weights.flag("symmetric", True)
    block = _block(weights, strategy)
    if stored in _PLAIN:
        if bits != 8:
            raise weights.error("num_bits", f"must be 8 in the format {stored}, got {bits}")
        dtype = torch.float8_e4m3fn if kind == "float" else torch.int8
        rounds_inputs = _are_rounded(inputs, kind)
        if kind == "int" and (not symmetric or block[1] != 0):
            rounds_inputs = False  # no kernel has int8 inputs and scales within a row
        return PlainFormat(dtype, block, symmetric=symmetric, rounds_inputs=rounds_inputs)
    if kind != "int" or not 2 <= bits <= 8 or strategy not in ("channel", "group"):
        raise weights.error(
            "num_bits",
            f"must be 2 to 8 of type int with the strategy channel or group in the format "
            f"{stored}, got {bits} of type {kind} with {strategy}",
        )
    return PackQuantizedFormat(
        bits,
        block[1],
        symmetric=symmetric,
        act_order=weights.value("actorder") in ("group", "dynamic"),
    )


def _are_rounded(activations: ConfigFile | None, kind: str) -> bool:
    """Return True if the inputs of a layer are rounded to the 8-bit type of its weight."""
    if activations is None:
        return False
    return activations.text("type", "int") == kind and activations.integer("num_bits", 8) == 8


def _block(weights: ConfigFile, strategy: str) -> tuple[int, int]:
    """The (rows, columns) that share a scale; 0 stands for all."""
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 1, 0
    if strategy == "group":
        return 1, weights.integer("group_size", high=MAX_GROUP_SIZE)
    sizes = weights.value("block_structure")
    if not (
        isinstance(sizes, list)
        and len(sizes) == 2
        and all(type(size) is int and 0 < size <= MAX_GROUP_SIZE for size in sizes)
    ):
        raise weights.error("block_structure", f"must hold two sizes, got {shorten(sizes)}")
    return sizes[0], sizes[1]

"""Reads the quantization_config of GPTQ and of AWQ."""

from __future__ import annotations

from typing import NamedTuple

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import MAX_GROUP_SIZE, MAX_PATTERNS
from paged_backend.quantization.formats import BLOCKS, EMBEDDING, Quantization, WeightFormat
from paged_backend.quantization.layer_names import LayerNames
from paged_backend.quantization.packed import AwqFormat, GptqFormat
from paged_backend.quantization.patterns import PatternMatcher, Patterns
from paged_backend.values.validation import shorten

_GPTQ_BITS = (2, 3, 4, 8)
_ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}


class _Overrides(NamedTuple):
    """The formats of the layers that match expressions; None leaves layers as they are."""

    patterns: Patterns
    formats: list[GptqFormat | None]


def read_awq(config: ConfigFile) -> Quantization:
    """Read which layers are quantized, and how.

    Raises:
        ConfigError: a key is missing or wrong, or the variant is not supported.
    """
    if config.integer(_either(config, "bits", "w_bit")) != 4:
        raise config.error("bits", f"must be 4, got {shorten(config.value('bits'))}")
    version = config.text("version", "gemm")
    if version.lower() != "gemm":
        raise config.error("version", f"must be gemm, got {shorten(version)}")
    if not config.flag("zero_point", True):
        raise config.error("zero_point", "must be true")
    chosen = AwqFormat(_group_size(config, _either(config, "group_size", "q_group_size")))
    skipped = LayerNames.read_parts(config, "modules_to_not_convert")
    output = config.flag("lm_head", False)

    def format_of(layer: str) -> WeightFormat | None:
        return chosen if _is_converted(layer, output) and layer not in skipped else None

    return Quantization("awq", format_of, converted=lambda layer: chosen)


def read_gptq(config: ConfigFile) -> Quantization:
    """Read which layers are quantized, and how; `dynamic` overrides the numbers of some layers.

    Raises:
        ConfigError: a key is missing or wrong, or the variant is not supported.
    """
    default = _gptq_format(config, config)
    overrides = _overrides(config)
    skipped = LayerNames.read_parts(config, "modules_to_not_convert")
    chosen = _modules_in_block(config)
    output = config.flag("lm_head", False)

    def format_of(layer: str) -> WeightFormat | None:
        found = overrides.patterns.first(layer)
        if found is not None:
            return overrides.formats[found]
        is_chosen = not chosen or any(name in layer for name in chosen)
        is_converted = _is_converted(layer, output) and is_chosen and layer not in skipped
        return default if is_converted else None

    def converted(layer: str) -> WeightFormat:
        found = overrides.patterns.first(layer)
        return default if found is None else overrides.formats[found] or default

    return Quantization("gptq", format_of, converted=converted)


def _modules_in_block(config: ConfigFile) -> list[str]:
    """Read the modules of each block that are quantized, by parts of names; empty for all.

    Optimum writes lists of the modules that are quantized together, and others one list.

    Raises:
        ConfigError: it holds something else.
    """
    key = "modules_in_block_to_quantize"
    groups = config.value(key) or []
    names: list[object] = []
    for group in groups if isinstance(groups, list) else [groups]:
        names.extend(group if isinstance(group, list) else [group])
    found = [name for name in names if isinstance(name, str)]
    if len(found) < len(names) or len(found) > MAX_PATTERNS:
        problem = f"must be a list of at most {MAX_PATTERNS} strings, or of lists of strings, got "
        problem += shorten(groups)
        raise config.error(key, problem)
    return found


def _overrides(config: ConfigFile) -> _Overrides:
    """Read ``dynamic``. Its keys are expressions; "-:" leaves layers as they are."""
    dynamic = config.section("dynamic") or config.with_only()
    keys = list(dynamic.keys())
    if len(keys) > MAX_PATTERNS:
        raise config.error("dynamic", f"must have at most {MAX_PATTERNS} entries")
    formats: list[GptqFormat | None] = []
    for key in keys:
        section = dynamic.section(key) or ConfigFile({}, "")
        formats.append(None if key.startswith("-:") else _gptq_format(section, config))
    expressions = [key.removeprefix("-:").removeprefix("+:") for key in keys]
    return _Overrides(Patterns(config, "dynamic", expressions, PatternMatcher()), formats)


def _gptq_format(override: ConfigFile, config: ConfigFile) -> GptqFormat:
    source = override if override.value("bits") is not None else config
    bits = source.integer("bits")
    if bits not in _GPTQ_BITS:
        raise source.error("bits", f"must be 2, 3, 4 or 8, got {bits}")
    grouped = override if override.value("group_size") is not None else config
    version = config.text("checkpoint_format", "gptq", _ZERO_OFFSETS)
    return GptqFormat(bits, _group_size(grouped, "group_size"), _ZERO_OFFSETS[version])


def _group_size(config: ConfigFile, key: str) -> int:
    """The number of inputs that share a scale; 0 for all, which the file writes as -1."""
    return 0 if config.value(key) == -1 else config.integer(key, high=MAX_GROUP_SIZE)


def _either(config: ConfigFile, key: str, old_key: str) -> str:
    return old_key if config.value(key) is None and config.value(old_key) is not None else key


def _is_converted(layer: str, output_layer: bool) -> bool:
    """Return whether a layer is quantized by default: layers of the decoder's blocks are."""
    return layer.startswith(BLOCKS) or (output_layer and layer != EMBEDDING)

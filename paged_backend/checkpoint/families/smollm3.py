"""SmolLM3: Llama with some layers that have no position embedding."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import (
    FULL,
    SLIDING,
    all_biases,
    layer_types,
    rope_section,
    windows_of,
)
from paged_backend.checkpoint.shape import Rotary, Variant, Windows
from paged_backend.values.validation import shorten


def smollm3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a SmolLM3 checkpoint."""
    rotated = _rotated_layers(config, num_layers)
    section = rope_section(config, rope_theta=2_000_000.0)
    return Variant(
        biases=all_biases(config),
        windows=_windows(config, rotated),
        rotary=Rotary(tuple(section if is_rotated else None for is_rotated in rotated)),
    )


def _rotated_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    """Read which layers have a rotary embedding; despite its name, the list has 1 for those."""
    flags = config.value("no_rope_layers")
    if flags is None:
        interval = config.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    is_list = isinstance(flags, list) and len(flags) >= num_layers
    if not is_list or not all(flag in (0, 1) for flag in flags):
        problem = f"must be a list of {num_layers} numbers, 0 or 1, got {shorten(flags)}"
        raise config.error("no_rope_layers", problem)
    return tuple(bool(flag) for flag in flags[:num_layers])


def _windows(config: ConfigFile, rotated: tuple[bool, ...]) -> Windows:
    # transformers masks the layers that the file lists, even without the flag.
    if not config.flag("use_sliding_window", False) and config.value("layer_types") is None:
        return ()
    default = tuple(FULL if is_rotated else SLIDING for is_rotated in rotated)
    return windows_of(config, layer_types(config, default))

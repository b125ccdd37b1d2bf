"""SmolLM3: Llama with some layers that have no position embedding."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import (
    FULL,
    SLIDING,
    all_biases,
    layer_types,
    rope_section,
    rotated_layers,
    windows_of,
)
from paged_backend.checkpoint.shape import Rotary, Variant, Windows


def smollm3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a SmolLM3 checkpoint."""
    rotated = rotated_layers(config, num_layers)
    section = rope_section(config, rope_theta=2_000_000.0)
    return Variant(
        biases=all_biases(config),
        windows=_windows(config, rotated),
        rotary=Rotary(tuple(section if is_rotated else None for is_rotated in rotated)),
    )


def _windows(config: ConfigFile, rotated: tuple[bool, ...]) -> Windows:
    # transformers masks the layers that the file lists, even without the flag.
    if not config.flag("use_sliding_window", False) and config.value("layer_types") is None:
        return ()
    default = tuple(FULL if is_rotated else SLIDING for is_rotated in rotated)
    return windows_of(config, layer_types(config, default))

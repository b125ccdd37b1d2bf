"""Phi-3 and Phi-4: fused weights, and a rotary embedding of part of a head in some models."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.context_length import LONG_ROPES, ORIGINAL, rope_type
from paged_backend.checkpoint.families.keys import one_window, rope_section, rotary_dim
from paged_backend.checkpoint.shape import Rotary, Variant


def phi3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Phi-3 or Phi-4 checkpoint."""
    section = _rope_section(config)
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return Variant(
        windows=one_window(config, num_layers),
        rotary=Rotary((section,) * num_layers, dim=rotary_dim(config, head_dim)),
        fused_qkv=True,
        fused_gate_up=True,
    )


def _rope_section(config: ConfigFile) -> ConfigFile:
    """Return the keys of the rotary embedding.

    LongRoPE is called ``yarn`` in early files, and the original length of config.json counts before
    that of the section.
    """
    section = rope_section(config)
    kind = rope_type(section)
    replaced = "type", "rope_type", ORIGINAL
    others = section.with_only(*(key for key in section.keys() if key not in replaced))
    original = config.value(ORIGINAL) or section.value(ORIGINAL)
    rope_kind = LONG_ROPES[0] if kind == "yarn" else kind
    return others.with_defaults(rope_type=rope_kind, **{ORIGINAL: original})

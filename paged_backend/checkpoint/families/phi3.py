"""Phi-3 and Phi-4: fused weights, and a rotary embedding of part of a head in some models."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import one_window, rotary_dim
from paged_backend.checkpoint.shape import Rotary, Variant


def phi3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a Phi-3 or Phi-4 checkpoint."""
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    return Variant(
        windows=one_window(config, num_layers),
        rotary=Rotary(dim=rotary_dim(config, head_dim)),
        fused_qkv=True,
        fused_gate_up=True,
    )

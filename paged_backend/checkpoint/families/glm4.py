"""GLM-4: norms before and after attention and MLP, rotated pairs of neighbors."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import rotary_dim
from paged_backend.checkpoint.shape import Biases, LayerNorms, Rotary, Variant

_NORMS = LayerNorms(
    attention_input="input_layernorm",
    attention_output="post_self_attn_layernorm",
    mlp_input="post_attention_layernorm",
    mlp_output="post_mlp_layernorm",
)


def glm4(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a GLM-4 checkpoint."""
    dim = rotary_dim(config, config.integer("head_dim", 128), default=0.5)
    return Variant(
        biases=Biases(qkv=config.flag("attention_bias", True)),
        norms=_NORMS,
        rotary=Rotary(dim=dim, interleaved=True),
        fused_gate_up=True,
    )

"""GLM-4 and GLM-4.5: a half of each head is rotated.

GLM-4 has norms before and after attention and MLP, and rotates pairs of neighbors. GLM-4.5 has
DeepSeek V3's experts behind the usual attention. For GLM-4 MoE Lite, see `deepseek`.
"""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.deepseek import after_dense, prediction_layers
from paged_backend.checkpoint.families.keys import rotary_dim
from paged_backend.checkpoint.moe_reader import read_deepseek_v3
from paged_backend.checkpoint.shape import Biases, LayerNorms, QKNormScope, Rotary, Variant

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


def glm4_moe(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a GLM-4.5 or GLM-4.6 checkpoint; only the inputs of heads have biases."""
    head_dim = config.integer("hidden_size") // config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", head_dim)
    moe, moe_layers = read_deepseek_v3(config), after_dense(config, num_layers)
    return Variant(
        biases=Biases(qkv=config.flag("attention_bias", False)),
        qk_norm=QKNormScope.HEAD if config.flag("use_qk_norm", False) else None,
        rotary=Rotary(dim=rotary_dim(config, head_dim, default=0.5)),
        moe=moe if any(moe_layers) else None,
        moe_layers=moe_layers if any(moe_layers) else (),
        prediction_layers=prediction_layers(config),
    )

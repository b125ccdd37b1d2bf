"""MiniCPM3: latent attention and MLPs, with factors on embeddings, residuals and logits."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.deepseek import latent_scale, read_latent
from paged_backend.checkpoint.families.keys import all_biases
from paged_backend.checkpoint.shape import Variant


def minicpm3(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a MiniCPM3 checkpoint; a missing ``v_head_dim`` follows from the sizes.

    A null for the depth or the width of the model that the factors are made for means no factor.
    """
    hidden = config.integer("hidden_size")
    value_dim = hidden // config.integer("num_attention_heads")
    latent = read_latent(config.with_defaults(v_head_dim=config.value("v_head_dim") or value_dim))
    depth = config.optional_number("scale_depth")
    base = config.optional_number("dim_model_base")
    return Variant(
        biases=all_biases(config),
        latent=latent,
        embedding_scale=config.number("scale_emb"),
        residual_scale=1.0 if depth is None else depth / num_layers**0.5,
        attention_scale=latent_scale(config, latent),
        logits_scale=1.0 if base is None else base / hidden,
    )

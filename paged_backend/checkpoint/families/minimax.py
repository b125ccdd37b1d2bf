"""MiniMax: lightning attention in most layers, and residuals that are taken after the norms."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.factors import ResidualFactors
from paged_backend.checkpoint.families.keys import FULL, LINEAR, layer_types, one_window
from paged_backend.checkpoint.limits import MAX_HEAD_DIM, MAX_HEADS
from paged_backend.checkpoint.mixers import LightningShape
from paged_backend.checkpoint.moe_reader import read_mixtral
from paged_backend.checkpoint.shape import Variant


def minimax(config: ConfigFile, num_layers: int) -> Variant:
    """Read the variant of a MiniMax checkpoint."""
    default = tuple((FULL, LINEAR)[layer % 2] for layer in range(num_layers))
    kinds = layer_types(config, default, known=(FULL, LINEAR))
    shape = _lightning(config, num_layers)
    return Variant(
        windows=one_window(config, num_layers),
        moe=read_mixtral(config),
        state_mixers=tuple(shape if kind == LINEAR else None for kind in kinds),
        residual_factors=ResidualFactors(
            *(_factors(config, part) for part in ("linear_attn", "full_attn", "mlp"))
        ),
    )


def _lightning(config: ConfigFile, num_layers: int) -> LightningShape:
    hidden = config.integer("hidden_size")
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    head_dim = config.integer("head_dim", max(1, hidden // heads), high=MAX_HEAD_DIM)
    return LightningShape(
        hidden_size=hidden, num_heads=heads, head_dim=head_dim, num_layers=num_layers
    )


def _factors(config: ConfigFile, part: str) -> tuple[float, float]:
    return config.number(f"{part}_alpha_factor", 1.0), config.number(f"{part}_beta_factor", 1.0)

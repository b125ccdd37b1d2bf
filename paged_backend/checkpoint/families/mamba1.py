"""Keys of config.json for layers of Mamba, which several families have."""

from __future__ import annotations

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.limits import MAX_HEAD_DIM, MAX_INNER_SIZE
from paged_backend.checkpoint.mamba import Mamba1Shape


def read_mamba1(config: ConfigFile, values_size: int | None = None) -> Mamba1Shape:
    """Read the sizes of a layer.

    Args:
        config: the file.
        values_size: the number of channels; None to read it as a multiple of the hidden size.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    hidden = config.integer("hidden_size")
    if values_size is None:
        values_size = config.integer("mamba_expand", 2, high=MAX_INNER_SIZE) * hidden
    if config.value("mamba_dt_rank") == "auto":
        config = config.replaced(mamba_dt_rank=None)
    return Mamba1Shape(
        hidden_size=hidden,
        values_size=values_size,
        state_dim=config.integer("mamba_d_state", 16, high=MAX_HEAD_DIM),
        rank=config.integer("mamba_dt_rank", -(-hidden // 16), high=MAX_INNER_SIZE),
        width=config.integer("mamba_d_conv", 4, low=2),
        bias=config.flag("mamba_proj_bias", False),
        conv_bias=config.flag("mamba_conv_bias", True),
    )

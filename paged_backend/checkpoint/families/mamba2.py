"""Keys of config.json for layers of Mamba-2, which several families have."""

from __future__ import annotations

import math

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.families.keys import FULL, LINEAR, layer_types
from paged_backend.checkpoint.limits import MAX_HEAD_DIM, MAX_HEADS, MAX_INNER_SIZE
from paged_backend.checkpoint.mamba import Mamba2Shape
from paged_backend.values.validation import shorten

_INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it into config.json
_OLDER_KINDS = {"mamba": LINEAR, "attention": FULL}


def read_mamba2(config: ConfigFile, values_size: int | None = None) -> Mamba2Shape:
    """Read the sizes of a layer.

    Args:
        config: the file.
        values_size: the size of all values of a token; None to read it as a multiple of the
            hidden size.

    Raises:
        ConfigError: a key is missing or wrong.
    """
    hidden = config.integer("hidden_size")
    if values_size is None:
        values_size = config.integer("mamba_expand", 2, high=MAX_INNER_SIZE) * hidden
    num_heads = config.integer("mamba_n_heads", 128, high=MAX_HEADS)
    if config.value("mamba_d_head") == "auto":
        config = config.replaced(mamba_d_head=None)
    head_dim = config.integer("mamba_d_head", max(1, values_size // num_heads), high=MAX_HEAD_DIM)
    if num_heads * head_dim != values_size:
        raise config.error(
            "mamba_n_heads",
            f"({num_heads}) times mamba_d_head ({head_dim}) must be the size of all heads, "
            f"{values_size}",
        )
    num_groups = config.integer("mamba_n_groups", 1)
    if num_heads % num_groups:
        raise config.error("mamba_n_groups", f"({num_groups}) must divide {num_heads} heads")
    bias = config.flag("mamba_proj_bias", False)
    return Mamba2Shape(
        hidden_size=hidden,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=config.integer("mamba_d_state", 256, high=MAX_HEAD_DIM),
        width=config.integer("mamba_d_conv", 4, low=2),
        in_bias=bias,
        out_bias=bias,
        conv_bias=config.flag("mamba_conv_bias", True),
        dt_limits=_time_step_limit(config),
    )


def hybrid_kinds(config: ConfigFile, default: tuple[str, ...]) -> tuple[str, ...]:
    """Read which layers have attention (`FULL`), and which ones Mamba (`LINEAR`).

    Args:
        config: the file, with the names of either version of transformers.
        default: the kind of each layer, if the file does not say.
    """
    kinds = config.value("layer_types") or config.value("layers_block_type")
    if isinstance(kinds, list):
        kinds = [_OLDER_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    return layer_types(config.replaced(layer_types=kinds), default, known=(FULL, LINEAR))


def _time_step_limit(config: ConfigFile) -> tuple[float, float]:
    limits = config.value("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    numbers = limits if isinstance(limits, list) else []
    numbers = [math.inf if number == _INFINITY else number for number in numbers]
    if len(numbers) != 2 or not all(type(number) in (int, float) for number in numbers):
        raise config.error("time_step_limit", f"must be two numbers, got {shorten(limits)}")
    low, high = numbers
    if not 0 <= low <= high:
        raise config.error("time_step_limit", f"must be 0 or more, in order; got {shorten(limits)}")
    return float(low), float(high)

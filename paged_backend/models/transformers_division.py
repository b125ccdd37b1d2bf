"""The shares that ranks have of a model that transformers computes, by transformers' own plan.

The plan names layers that are divided along their outputs, and layers that read these outputs and
are divided along their inputs. Each rank has the whole of everything else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from paged_backend.checkpoint.mixer_shares import OPTION
from paged_backend.checkpoint.shares import Share, Shares
from paged_backend.models.division import Group
from paged_backend.values.errors import option_error

_DIMS = {"colwise": 0, "rowwise": 1}


def plan_shares(model: Any, linear: tuple[type[nn.Module], ...], group: Group) -> Shares:
    """Return what a rank has of the weights and biases of a model's linear layers.

    Args:
        model: a model of transformers.
        linear: the classes of linear layers that can be divided.
        group: the ranks.

    Raises:
        ConfigError: there is no plan, or a size does not divide.
    """
    config = model.config.get_text_config(decoder=True)
    for name in ("num_attention_heads", "num_key_value_heads"):
        _check(getattr(config, name, group.size), name, group)
    dims = dict(_planned(model, linear))
    if not dims:
        raise option_error(
            OPTION,
            f"can only be 1 for {type(model).__name__}, for which transformers has no plan that "
            f"divides its layers; got {group.size}",
        )
    shares: dict[str, Share] = {}
    for name, dim in dims.items():
        layer = model.get_submodule(name)
        whole = layer.out_features, layer.in_features
        _check(whole[dim], name, group)
        size = whole[dim] // group.size
        piece = (group.rank * size, size)
        shape = (size, whole[1]) if dim == 0 else (whole[0], size)
        shares[f"{name}.weight"] = Share(whole, shape, dim, (piece,))
        if dim == 0:
            shares[f"{name}.bias"] = Share(whole[:1], (size,), 0, (piece,))
        elif group.rank > 0:
            shares[f"{name}.bias"] = Share(whole[:1], whole[:1], None)
    return shares


def _planned(model: Any, linear: tuple[type[nn.Module], ...]) -> Iterator[tuple[str, int]]:
    """Yield the names of layers that are divided, and the dimension of each one's weight."""
    plan = {re.escape(name).replace(r"\*", r"\d+"): kind for name, kind in model.tp_plan.items()}
    for name, layer in model.named_modules():
        if type(layer) in linear:
            kinds = (kind for pattern, kind in plan.items() if re.fullmatch(pattern, name))
            kind = next(kinds, None)
            if kind in _DIMS:
                yield name, _DIMS[kind]


def _check(size: int, name: str, group: Group) -> None:
    if size % group.size:
        raise option_error(OPTION, f"must divide the model's {size} {name}; got {group.size}")

"""Norms and activations of transformers' models that are computed by a platform's kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import GELUActivation

from paged_backend.models.layers import LayerFunctions


class KernelLayerNorm(nn.Module):
    """Computes a layer norm with a platform's function."""

    def __init__(self, layer: nn.LayerNorm, functions: LayerFunctions) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias
        self._eps = layer.eps
        self._norm = functions.layer_norm

    def forward(self, x: Tensor) -> Tensor:
        """Return the norm of `x` [..., size]."""
        rows = x.reshape(-1, x.shape[-1])
        return self._norm(rows, self.weight, self.bias, self._eps).view(x.shape)


class KernelActivation(nn.Module):
    """Computes an activation with a platform's function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of each number of `x` [..., size]."""
        return self._function(x.reshape(-1, x.shape[-1])).view(x.shape)


def replace_row_functions(model: nn.Module, functions: LayerFunctions) -> None:
    """Replace the layer norms and the activations GELU of a model.

    Layer norms without a bias or over several dimensions stay, and so do approximations of GELU.
    """
    for name, layer in [*model.named_modules()]:
        replacement: nn.Module | None = None
        if type(layer) is nn.LayerNorm and layer.bias is not None and len(layer.weight.shape) == 1:
            replacement = KernelLayerNorm(layer, functions)
        elif _is_gelu(layer):
            replacement = KernelActivation(functions.gelu)
        if replacement is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)


def _is_gelu(layer: nn.Module) -> bool:
    if type(layer) is GELUActivation:
        return bool(layer.act is F.gelu)
    return type(layer) is nn.GELU and layer.approximate == "none"

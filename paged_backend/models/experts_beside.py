"""Experts beside an MLP, each with norms of its inputs and outputs (Gemma 4)."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.moe import MoeShape
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.blocks import GatedMLP, prefixed
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod
from paged_backend.models.moe import MoeMLP


class ExpertsBesideMLP:
    """The sum of norms of two outputs: of an MLP, and of experts that read other norms.

    The router reads a third norm of the same hidden states. See
    :class:`~paged_backend.models.linear.RowFunction`.

    Args:
        config: sizes and variant of the model.
        moe: the experts, with `beside_norms`.
        index: the layer's number.
        prefix: the name of the layer in the checkpoint.
        kernels: the platform.
    """

    reader: LinearMethod | None = None
    """Several layers read the input."""

    def __init__(
        self, config: ModelConfig, moe: MoeShape, index: int, prefix: str, kernels: Kernels
    ) -> None:
        assert moe.beside_norms is not None
        name, hidden = config.variant.names.mlp, config.hidden_size
        self._name, self._names = name, moe.beside_norms
        self._mlp = GatedMLP(config, index, f"{prefix}.{name}", kernels)
        self._moe = MoeMLP(moe, prefix, kernels)
        self._norm, self._eps = kernels.layers.rms_norm, config.rms_norm_eps
        names = moe.beside_norms
        self._weights = {
            name: torch.empty(hidden, dtype=kernels.dtype, device=kernels.device)
            for name in (
                *(names.mlp_input, names.mlp_output),
                *(names.experts_input, names.experts_output),
            )
        }
        # A factor that may have more bits than the dtype is multiplied into it.
        self._router = torch.empty(hidden, dtype=torch.float32, device=kernels.device)

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the layer."""
        parameters = prefixed(self._name, self._mlp.parameters()) | self._moe.parameters()
        return parameters | self._weights | {self._names.router: self._router}

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self._mlp.pack()
        self._moe.pack()
        self._router *= len(self._router) ** -0.5

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the sum [rows, hidden_size] for hidden states `x` [rows, hidden_size]."""
        names = self._names
        beside = self._normed(self._mlp(self._normed(x, names.mlp_input)), names.mlp_output)
        chosen = self._moe.router(self._norm(x, self._router, self._eps))
        experts = self._moe.compute_chosen(self._normed(x, names.experts_input), *chosen)
        return beside + self._normed(experts, names.experts_output)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, hidden_size] in place."""
        out += self(x)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, self._weights[name], self._eps)

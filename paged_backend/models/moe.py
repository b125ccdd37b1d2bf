"""The block of a mixture-of-experts layer: a router, experts, and maybe a shared expert."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import relu

from paged_backend.checkpoint.moe import MoeShape
from paged_backend.checkpoint.moe_tensors import latent_projections
from paged_backend.checkpoint.shape import Activation
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.experts import ExpertsSpec
from paged_backend.models.layers import Kernels
from paged_backend.models.linear import LinearMethod, LinearSpec, RowFunction


class Router:
    """Chooses the experts of each row, and weighs them.

    Args:
        moe: sizes and variants.
        prefix: the name of the layer's module in the checkpoint.
        kernels: the platform.
    """

    def __init__(self, moe: MoeShape, prefix: str, kernels: Kernels) -> None:
        parts = {moe.names.router: moe.num_experts}
        spec = LinearSpec(moe.hidden_size, parts, moe.bias, prefix, full_precision=True)
        self._linear = kernels.linear(spec)
        self._routing = self._chosen = moe.routing
        if moe.routing.norm_topk_prob and moe.routing.norm_offset:  # we divide, not the platform
            self._chosen = replace(moe.routing, norm_topk_prob=False, scale=1.0)
        self._bias: dict[str, Tensor] = {}
        if moe.routing.biased:
            bias = torch.empty(moe.num_experts, device=kernels.device)
            self._bias[moe.names.bias] = bias
        self._factors: dict[str, Tensor] = {}
        if moe.routing.has_factors:
            factors = torch.empty(moe.num_experts, device=kernels.device)
            self._factors[moe.names.factors] = factors
        self._choose_experts = kernels.layers.choose_experts

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        return self._linear.parameters() | self._bias | self._factors

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self._linear.pack()

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ids int32 and the weights float32 of the experts of each row of `x`.

        Both are [rows, num_experts_per_tok], and the expert with the largest score comes first. Of
        equal ones, the expert with the lowest id does.
        """
        bias = next(iter(self._bias.values()), None)
        ids, weights = self._choose_experts(self._linear(x), self._chosen, bias)
        if self._chosen is not self._routing:
            sums = weights.sum(1, keepdim=True) + self._routing.norm_offset
            weights = weights * (self._routing.scale / sums)
        for factors in self._factors.values():
            weights = weights * factors[ids]
        return ids, weights


class SharedExpertMLP:
    """down(silu(gate(x)) * up(x)), times sigmoid(shared_expert_gate(x)) if there is such a gate.

    A plain one is down(max(up(x), 0) ** 2).

    Args:
        moe: sizes and variants, with a shared expert.
        prefix: the name of the layer's module in the checkpoint.
        kernels: the platform.
    """

    def __init__(self, moe: MoeShape, prefix: str, kernels: Kernels) -> None:
        assert moe.shared_expert is not None
        hidden, inner = moe.hidden_size, moe.shared_expert.intermediate_size
        parts, name = {"gate_proj": inner, "up_proj": inner}, f"{prefix}.{moe.names.shared}"
        self._name, self._plain = moe.names.shared, moe.plain
        if moe.plain:
            del parts["gate_proj"]
        bias = moe.outer_bias
        spec = LinearSpec(hidden, parts, bias, name, gated=not moe.plain)
        self._gate_up_proj = kernels.linear(spec)
        self._down_proj = kernels.linear(LinearSpec(inner, {"down_proj": hidden}, bias, name))
        gate = LinearSpec(hidden, {"shared_expert_gate": 1}, prefix=prefix, full_precision=True)
        self._gate = kernels.linear(gate) if moe.shared_expert.gated else None
        self._functions = kernels.layers

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the layer's module."""
        parts = self._gate_up_proj.parameters() | self._down_proj.parameters()
        parameters = {f"{self._name}.{name}": place for name, place in parts.items()}
        return parameters if self._gate is None else parameters | self._gate.parameters()

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        for linear in (self._gate_up_proj, self._down_proj, self._gate):
            if linear is not None:
                linear.pack()

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add the output for `x` [rows, hidden_size] to `out` [rows, hidden_size] in place."""
        if self._plain:
            activated = relu(self._gate_up_proj(x)).square_()
        else:
            activated = self._functions.gated(self._gate_up_proj, x, Activation.SILU)
        if self._gate is None:
            self._down_proj.add_to(out, activated)
        else:
            self._functions.add_gated(out, self._down_proj(activated), self._gate(x))


class MoeMLP:
    """A mixture-of-experts layer in place of a gated MLP.

    Like a linear layer, it can add its output to the hidden states
    (:class:`~paged_backend.models.linear.RowFunction`).

    Args:
        moe: sizes and variants.
        prefix: the name of its module in the checkpoint, such as ``model.layers.0.mlp``.
        kernels: the platform.
    """

    reader: LinearMethod | None = None
    """Several layers read the input."""

    def __init__(self, moe: MoeShape, prefix: str, kernels: Kernels) -> None:
        self.router = Router(moe, prefix, kernels)
        self._add = kernels.layers.add
        self._of_inputs = moe.routing.of_inputs
        self.experts = kernels.experts(ExpertsSpec.of(moe, f"{prefix}.experts"))
        has_shared = moe.shared_expert is not None
        self.shared_expert = SharedExpertMLP(moe, prefix, kernels) if has_shared else None
        self._latent: list[LinearMethod] = []  # the layer before the experts, and that after them
        if moe.latent_size is not None:
            self._latent = [
                kernels.linear(LinearSpec(inputs, {name: outputs}, moe.outer_bias, prefix))
                for name, (inputs, outputs) in latent_projections(moe).items()
            ]

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        experts = self.experts.parameters()
        parameters = self.router.parameters()
        parameters |= {f"experts.{name}": place for name, place in experts.items()}
        for linear in self._latent:
            parameters |= linear.parameters()
        return parameters | (self.shared_expert.parameters() if self.shared_expert else {})

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.router.pack()
        self.experts.pack()
        for linear in self._latent:
            linear.pack()
        if self.shared_expert is not None:
            self.shared_expert.pack()

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, hidden_size] for `x` [rows, hidden_size]."""
        return self.compute_chosen(x, *self.router(x))

    def compute_chosen(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the output for rows `x`, given what the router returns for them."""
        if self._latent:
            before, after = self._latent
            out = after(self.experts(before(x), ids, weights))
        elif self._of_inputs:
            out = self._sum_of_scaled(x, ids, weights)
        else:
            out = self.experts(x, ids, weights)
        if self.shared_expert is not None:
            self.shared_expert.add_to(out, x)
        return out

    def _sum_of_scaled(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute the sum of the outputs of each row's experts for the row times their weights."""
        scaled = x.unsqueeze(1) * weights.to(x.dtype).unsqueeze(2)
        each = ids.reshape(-1, 1)
        out = self.experts(scaled.flatten(0, 1), each, torch.ones_like(each, dtype=torch.float32))
        total, *others = out.view(scaled.shape).unbind(1)
        for other in others:  # in the order of the ids
            total = total + other
        return total

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, hidden_size] in place."""
        self._add(out, self(x))


class SummedMLPs:
    """Two modules that read the same rows, and the sum of their outputs (Granite 4).

    See :class:`~paged_backend.models.linear.RowFunction`.
    """

    reader: LinearMethod | None = None
    """Several layers read the input."""

    def __init__(self, first: RowFunction, second: RowFunction) -> None:
        self._first, self._second = first, second

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, hidden_size] for `x` [rows, hidden_size]."""
        out = self._first(x)
        self._second.add_to(out, x)
        return out

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, hidden_size] in place."""
        out += self(x)

"""The experts of a layer in plain torch, for any device and dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paged_backend.checkpoint.moe import ExpertLayout, SwiGLU
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.experts import ExpertsSpec


class TorchExperts:
    """Dense weights; see :class:`~paged_backend.models.experts.ExpertsMethod`.

    The reference of other implementations, which computes one row at a time. The weights of gate
    and up are [num_experts, 2 * intermediate_size, hidden_size] with gate and up in turns. Tensors
    of checkpoints are views of it, but `pack` brings halves into this order.
    Plain experts have [num_experts, intermediate_size, hidden_size].
    """

    def __init__(self, spec: ExpertsSpec, dtype: torch.dtype, device: torch.device) -> None:
        def empty(*shape: int) -> Tensor:
            return torch.empty(spec.num_experts, *shape, dtype=dtype, device=device)

        hidden, inner = spec.hidden_size, spec.intermediate_size
        self._spec = spec
        both = inner if spec.plain else 2 * inner
        self._gate_up = empty(both, hidden)
        self._down = empty(hidden, inner)
        self._gate_up_bias = empty(both) if spec.bias else None
        self._down_bias = empty(hidden) if spec.bias else None

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        match self._spec.names.layout:
            case ExpertLayout.SEPARATE:
                return self._separate_parameters()
            case ExpertLayout.TURNS:
                return self._parameters_in_turns()
            case ExpertLayout.HALVES:
                return {"gate_up_proj": self._gate_up, "down_proj": self._down}
            case ExpertLayout.COLUMNS:
                return self._transposed()

    def pack(self) -> None:
        """Bring gate and up into turns."""
        if self._spec.names.layout.has_halves:
            for weight in self._gate_up:
                weight.copy_(torch.stack(weight.chunk(2), dim=1).flatten(0, 1))

    def __call__(self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor) -> Tensor:
        """Compute the weighted sum of the outputs of each row's experts, in the order of its ids.

        See `ExpertsMethod.__call__`.
        """
        outputs = x.new_zeros(*expert_ids.shape, x.shape[1])
        for row, experts in enumerate(expert_ids.tolist()):
            for rank, expert in enumerate(experts):
                if expert < self._spec.num_experts:
                    outputs[row, rank] = self._expert(expert, x[row])
        return weighted_sum(outputs, expert_weights).to(x.dtype)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        """Compute the output of one expert for a row `x` [hidden_size].

        torch rounds the result of a row in another way if there are other rows.
        """

        def bias(biases: Tensor | None) -> Tensor | None:
            return None if biases is None else biases[expert]

        gate_up = F.linear(x.clone(), self._gate_up[expert], bias(self._gate_up_bias))
        if self._spec.plain:
            activated = squared_relu(gate_up)
        else:
            activated = swiglu(gate_up[::2], gate_up[1::2], self._spec.activation)
        return F.linear(activated, self._down[expert], bias(self._down_bias))

    def _transposed(self) -> dict[str, Parameter]:
        """Return the tensors of all experts with their inputs before their outputs."""
        return {
            "gate_up_proj": self._gate_up.transpose(1, 2),
            "down_proj": self._down.transpose(1, 2),
        }

    def _parameters_in_turns(self) -> dict[str, Parameter]:
        parameters = self._transposed()
        if self._gate_up_bias is not None and self._down_bias is not None:
            parameters["gate_up_proj_bias"] = self._gate_up_bias
            parameters["down_proj_bias"] = self._down_bias
        return parameters

    def _separate_parameters(self) -> dict[str, Parameter]:
        names = self._spec.names
        parameters: dict[str, Parameter] = {}
        tensors: dict[str, tuple[Tensor, Tensor]] = {"weight": (self._gate_up, self._down)}
        if self._gate_up_bias is not None and self._down_bias is not None:
            tensors["bias"] = self._gate_up_bias, self._down_bias
        parts = self._spec.input_parts
        for kind, (gate_up, down) in tensors.items():
            for expert, number in enumerate(self._spec.numbers):
                for first, name in enumerate(parts):
                    parameters[f"{number}.{name}.{kind}"] = gate_up[expert, first :: len(parts)]
                parameters[f"{number}.{names.down}.{kind}"] = down[expert]
        return parameters


def swiglu(gate: Tensor, up: Tensor, activation: SwiGLU) -> Tensor:
    """Compute the activation in float32, rounded once, for `gate` and `up` of one shape."""
    dtype, gate, up = gate.dtype, gate.float(), up.float()
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    factor = activation.alpha + activation.cubic * gate * gate
    sigmoid = torch.sigmoid(factor * gate)
    return ((up + activation.up_offset) * (gate * sigmoid)).to(dtype)


def squared_relu(up: Tensor) -> Tensor:
    """Compute max(up, 0) ** 2 in float32, rounded once."""
    return torch.relu(up.float()).square().to(up.dtype)


def swiglu_of_rows(gate_up: Tensor, activation: SwiGLU) -> Tensor:
    """Compute the activation [rows, size] for the two halves of each row of `gate_up`.

    It does so row by row, as torch rounds numbers in another way at the end of a tensor.
    """
    size = gate_up.shape[1] // 2
    rows = [swiglu(row[:size], row[size:], activation) for row in gate_up]
    return torch.stack(rows) if rows else gate_up.new_empty(0, size)


def weighted_sum(outputs: Tensor, expert_weights: Tensor) -> Tensor:
    """Add the outputs [rows, ranks, size] times their weights [rows, ranks] in the ranks' order.

    Returns:
        [rows, size] float32.
    """
    total = torch.zeros(len(outputs), outputs.shape[2], device=outputs.device)
    for rank in range(outputs.shape[1]):
        total += outputs[:, rank] * expert_weights[:, rank, None]
    return total

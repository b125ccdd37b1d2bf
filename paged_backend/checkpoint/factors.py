"""Factors on what the parts of a layer read and compute, as values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Factors on the queries that grow: 1 + rate * ln(1 + (position + first) // period).

    Attributes:
        rate: see above.
        period: see above.
        first: see above.
        only_unrotated: whether layers with a rotary embedding have no such factors.
    """

    rate: float
    period: int
    first: int = 0
    only_unrotated: bool = False


@dataclass(frozen=True, slots=True)
class LayerFactors:
    """Factors on inputs and outputs of the parts of a layer (Falcon-H1).

    Attributes:
        attention_input: factor on what attention reads, if it is beside a module with a state.
        attention_output: factor on the output of this attention.
        state_input: factor on what that module reads.
        state_output: factor on its output.
        mlp_gate: factor on the gate of the MLP, before the activation.
        mlp_output: factor on the output of the MLP.
    """

    attention_input: float = 1.0
    attention_output: float = 1.0
    state_input: float = 1.0
    state_output: float = 1.0
    mlp_gate: float = 1.0
    mlp_output: float = 1.0


@dataclass(frozen=True, slots=True)
class ResidualFactors:
    """Factors for residuals that are taken after the norm (MiniMax).

    After a part of a layer, the hidden states are one factor times what the part has read, which is
    their norm, and another one times its output.

    Attributes:
        state: these factors for a module with a state.
        attention: those for attention.
        mlp: those for the MLP or the experts.
    """

    state: tuple[float, float]
    attention: tuple[float, float]
    mlp: tuple[float, float]

"""States of sequences: what some layers keep for a whole sequence, in slots of a pool.

A step reads the state before the tokens that it computes, and writes the state after them. The
scheduler chooses the slots (`core/state_slots.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class KeptTensor(NamedTuple):
    """One tensor of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """The bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer that keeps a state for each sequence.

    Attributes:
        index: the layer's number in the model.
        tensors: the tensors of the state.
    """

    index: int
    tensors: tuple[KeptTensor, ...]


@dataclass(frozen=True, slots=True)
class StateStep:
    """The rows of a step that belong to each sequence, as functions on states see them.

    Attributes:
        slots: [num_seqs, 2] int32, the slots that each sequence reads and writes. Reading slot 0
            means a state of zeros.
        query_start_loc: [num_seqs + 1] int32, the first row of each sequence, and the number of
            rows.
        seq_lens: [num_seqs] int32, the rows of each sequence in this and all earlier steps.
        num_decodes: number of leading sequences that have exactly one row.
    """

    slots: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    num_decodes: int


class StateFunctions(Protocol):
    """Functions on rows and states; `paged_kernels.reference` has their meaning.

    A pool has one entry for each slot, and is changed. A result depends on nothing but the rows of
    the sequence. It does not depend on how they are divided into steps, either, as far as the
    scheduler divides them as the platform's `state_chunks` ask for.
    """

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        pool: Tensor,
        step: StateStep,
        *,
        silu: bool,
    ) -> Tensor:
        """Convolve each channel of `x` [num_tokens, channels] with its last rows.

        Args:
            x: the inputs.
            weight: [channels, width].
            bias: [channels], or None.
            pool: [num_slots, channels, width - 1].
            step: the rows of each sequence.
            silu: whether to apply SiLU to the results.

        Returns:
            [num_tokens, channels].
        """
        ...

    def delta_gates(
        self, shares: Tensor, rates: Tensor, decay: Tensor, dt_bias: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Compute the logarithms of decays, and the shares of values that are corrected.

        Args:
            shares: [num_tokens, heads] float32, the numbers for shares; there may be others.
            rates: [num_tokens, count] float32, those for decays of heads or of channels.
            decay: [count] float32, negative.
            dt_bias: [count] float32.

        Returns:
            decay * softplus(rate + dt_bias) [num_tokens, count], and sigmoid(share)
            [num_tokens, heads].
        """
        ...

    def gated_delta(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        pool: Tensor,
        step: StateStep,
    ) -> Tensor:
        """Compute linear attention by the gated delta rule.

        Args:
            q: [num_tokens, num_key_heads, key_dim].
            k: the same.
            v: [num_tokens, num_value_heads, value_dim].
            g: [num_tokens, num_value_heads] float32, the logarithm of the decay.
            beta: [num_tokens, num_value_heads].
            pool: [num_slots, num_value_heads, key_dim, value_dim] float32.
            step: the rows of each sequence.

        Returns:
            [num_tokens, num_value_heads, value_dim].
        """
        ...

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        slopes: Tensor,
        pool: Tensor,
        step: StateStep,
    ) -> Tensor:
        """Compute linear attention with a fixed decay for each head, without a scale.

        Args:
            q: [num_tokens, heads, key_dim].
            k: the same.
            v: [num_tokens, heads, value_dim].
            slopes: [heads] float32, positive; a row multiplies the state by exp(-slope).
            pool: [num_slots, heads, key_dim, value_dim] float32.
            step: the rows of each sequence.

        Returns:
            [num_tokens, heads, value_dim].
        """
        ...

    def selective_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        dt_bias: Tensor | None,
        pool: Tensor,
        step: StateStep,
        *,
        dt_limits: tuple[float, float] = (0.0, math.inf),
    ) -> Tensor:
        """Compute the selective scan of Mamba-2.

        Args:
            x: [num_tokens, heads, head_dim].
            dt: [num_tokens, heads], time steps before the bias and softplus.
            a: [heads] float32, negative.
            b: [num_tokens, groups, state_dim].
            c: the same.
            d: [heads], or None.
            dt_bias: [heads], or None.
            pool: [num_slots, heads, head_dim, state_dim] float32.
            step: the rows of each sequence.
            dt_limits: the smallest and the largest time step.

        Returns:
            [num_tokens, heads, head_dim].
        """
        ...

    def mamba1_scan(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        dt_bias: Tensor | None,
        pool: Tensor,
        step: StateStep,
    ) -> Tensor:
        """Compute the selective scan of Mamba, with a decay for each number of a state.

        Args:
            x: [num_tokens, inner].
            dt: [num_tokens, inner], time steps before the bias and softplus.
            a: [inner, state_dim] float32, negative.
            b: [num_tokens, state_dim].
            c: the same.
            d: [inner], or None.
            dt_bias: [inner], or None.
            pool: [num_slots, inner, state_dim] float32.
            step: the rows of each sequence.

        Returns:
            [num_tokens, inner].
        """
        ...

    def rg_lru(
        self,
        x: Tensor,
        input_gate: Tensor,
        recurrent_gate: Tensor,
        recurrent_param: Tensor,
        pool: Tensor,
        step: StateStep,
    ) -> Tensor:
        """Compute a real-gated linear recurrent unit.

        Args:
            x: [num_tokens, width].
            input_gate: [num_tokens, width], before the sigmoid.
            recurrent_gate: the same.
            recurrent_param: [width].
            pool: [num_slots, width] float32.
            step: the rows of each sequence.

        Returns:
            [num_tokens, width], the states after each row.
        """
        ...


@dataclass(frozen=True, slots=True)
class StateSpec:
    """The states of a model's sequences.

    Attributes:
        layers: the layers that keep states.
        num_slots: slots of the pool, with slot 0, which is the only one before the pool has its
            size.
    """

    layers: tuple[StateLayer, ...]
    num_slots: int = 1

    @property
    def bytes_per_slot(self) -> int:
        """The bytes of the state of a sequence in all layers."""
        return sum(kept.num_bytes for layer in self.layers for kept in layer.tensors)

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots."""
        return self.num_slots * self.bytes_per_slot


class StatePool:
    """The states of all slots, by layer.

    Args:
        spec: the layers and the number of slots.
        functions: the platform's functions on states.
        device: where the states are.

    Attributes:
        functions: the same.
    """

    def __init__(self, spec: StateSpec, functions: StateFunctions, device: torch.device) -> None:
        self.functions = functions
        self._tensors: dict[int, Sequence[Tensor]] = {
            layer.index: [
                torch.zeros(spec.num_slots, *kept.shape, dtype=kept.dtype, device=device)
                for kept in layer.tensors
            ]
            for layer in spec.layers
        }

    def of(self, layer: StateLayer) -> Sequence[Tensor]:
        """Return the tensors of a layer's states, each [num_slots, ...]."""
        return self._tensors[layer.index]

"""Two modules that mix tokens in one layer, the sum of which is added to the hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from paged_backend.checkpoint.factors import LayerFactors
from paged_backend.models.attention import AttentionBackend, AttentionMetadata, CachedLayer
from paged_backend.models.linear import LinearMethod
from paged_backend.models.mixer import Mixer
from paged_backend.models.states import StateLayer


class ParallelMixers:
    """Attention and a module with a state, side by side (Falcon-H1); see `models.mixer.Mixing`.

    What `o_proj` reads are the rows of the state's module, then those of attention.

    Args:
        state: the module with a state.
        state_size: size of the rows that its last product reads.
        attention: the attention.
        factors: factors on inputs and outputs.
    """

    reader: LinearMethod | None = None
    """Two layers read the input."""

    def __init__(
        self, state: Mixer, state_size: int, attention: Mixer, factors: LayerFactors
    ) -> None:
        self._state, self._attention, self._factors = state, attention, factors
        self.o_proj = _SumOfOutputs(state, state_size, attention, factors)

    @property
    def kept_tokens(self) -> CachedLayer | None:
        """What attention keeps for each token."""
        return self._attention.kept_tokens

    @property
    def kept_state(self) -> StateLayer | None:
        """What the other module keeps for each sequence."""
        return self._state.kept_state

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads; see `Mixing.mix`."""
        factors = self._factors
        state = self._state.mix(_scaled(x, factors.state_input), backend, meta)
        attended = self._attention.mix(_scaled(x, factors.attention_input), backend, meta)
        return torch.cat((state, attended), dim=1)


class _SumOfOutputs:
    """The sum of the last products of two modules; see `models.linear.RowFunction`."""

    def __init__(
        self, state: Mixer, state_size: int, attention: Mixer, factors: LayerFactors
    ) -> None:
        self._state, self._attention, self._factors = state, attention, factors
        self._state_size = state_size

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the output [rows, outputs] for `x` [rows, inputs]."""
        state, attended = x[:, : self._state_size], x[:, self._state_size :]
        output = _scaled(self._state.o_proj(state.contiguous()), self._factors.state_output)
        other = self._attention.o_proj(attended.contiguous())
        return output + _scaled(other, self._factors.attention_output)

    def add_to(self, out: Tensor, x: Tensor) -> None:
        """Add `self(x)` to `out` [rows, outputs] in place."""
        out += self(x)


def _scaled(x: Tensor, factor: float) -> Tensor:
    return x if factor == 1 else x * factor

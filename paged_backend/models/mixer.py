"""The part of a layer that lets tokens see earlier ones: attention, or something in its place."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata, CachedLayer
from paged_backend.models.linear import LinearMethod
from paged_backend.models.states import StateLayer


class Mixer(Protocol):
    """Computes rows of hidden states from those of the same and of earlier tokens.

    The constructor allocates the weights without values. Fill every tensor in `parameters()`, then
    call `pack` once.
    """

    @property
    def name(self) -> str:
        """The name of the module in a layer of the checkpoint."""
        ...

    @property
    def reader(self) -> LinearMethod | None:
        """The linear layer that alone reads the input; None if several do."""
        ...

    @property
    def o_proj(self) -> LinearMethod:
        """The last product, which reads what `mix` returns."""
        ...

    @property
    def kept_tokens(self) -> CachedLayer | None:
        """What the layer keeps for each token; None if it keeps nothing for tokens."""
        ...

    @property
    def kept_state(self) -> StateLayer | None:
        """What the layer keeps for each sequence; None if it keeps nothing for sequences."""
        ...

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the module."""
        ...

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        ...

    def mix(self, x: Tensor, backend: AttentionBackend, meta: AttentionMetadata) -> Tensor:
        """Compute what `o_proj` reads, for `x` [num_tokens, hidden_size].

        Args:
            x: the normed hidden states of the step.
            backend: keeps what later tokens read.
            meta: the layout of the step.
        """
        ...

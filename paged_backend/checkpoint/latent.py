"""Latent attention as values: its sizes, and the tensors that a checkpoint holds of it.

Keys and values of all heads are products of one vector per token, the latent vector, and only this
vector and one rotary key are cached. DeepSeek-AI, "DeepSeek-V2: A Strong, Economical, and Efficient
Mixture-of-Experts Language Model" (2024), section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_backend.checkpoint.tensors import Role, TensorSpec, linear_tensors


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of the latent attention of a decoder, by the numbers of each token or head.

    Attributes:
        rank: size of the latent vector, which keys and values are made of.
        rotary_dim: size of the part of a query or key that the rotary embedding turns. The keys of
            all heads share this part.
        plain_dim: size of the other part of a query or key.
        value_dim: size of a value.
        query_rank: size of the vector that queries are made of; None if they are made of the hidden
            states.
        norm_eps: epsilon of the norms of these two vectors.
    """

    rank: int
    rotary_dim: int
    plain_dim: int
    value_dim: int
    query_rank: int | None = None
    norm_eps: float = 1e-6

    @property
    def row_size(self) -> int:
        """The number of cached numbers of a token: its latent vector, then its rotary key."""
        return self.rank + self.rotary_dim

    @property
    def query_dim(self) -> int:
        """The size of a query or key."""
        return self.plain_dim + self.rotary_dim

    @property
    def down_parts(self) -> dict[str, int]:
        """The checkpoint's names of the layers that read hidden states, and their sizes.

        The first one makes the vector of the queries, unless there is none.
        """
        queries = {} if self.query_rank is None else {"q_a_proj": self.query_rank}
        return {**queries, "kv_a_proj_with_mqa": self.row_size}

    @property
    def query_name(self) -> str:
        """The checkpoint's name of the layer that makes the queries."""
        return "q_proj" if self.query_rank is None else "q_b_proj"

    @property
    def norms(self) -> dict[str, int]:
        """The checkpoint's names of the norms, and their sizes."""
        queries = {} if self.query_rank is None else {"q_a_layernorm": self.query_rank}
        return {**queries, "kv_a_layernorm": self.rank}


def latent_tensors(
    latent: LatentShape, hidden: int, num_heads: int, *, bias: bool
) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the tensors of one layer, by their names relative to ``self_attn``.

    Ranks divide the heads; each has the latent vector as a whole.

    Args:
        latent: the sizes.
        hidden: size of hidden states.
        num_heads: number of heads.
        bias: whether the layers that read hidden states, and the output projection, have biases.
    """
    for name, size in latent.down_parts.items():
        yield f"{name}.weight", TensorSpec((size, hidden), Role.LINEAR)
        if bias:
            yield f"{name}.bias", TensorSpec((size,), Role.BIAS)
    for name, size in latent.norms.items():
        yield f"{name}.weight", TensorSpec((size,), Role.NORM)
    inputs = latent.query_rank or hidden
    queries = num_heads * latent.query_dim
    yield from linear_tensors(latent.query_name, inputs, queries, False, shard=0)
    outputs = num_heads * (latent.plain_dim + latent.value_dim)
    yield from linear_tensors("kv_b_proj", latent.rank, outputs, False, shard=0)
    yield from linear_tensors("o_proj", num_heads * latent.value_dim, hidden, bias, shard=1)

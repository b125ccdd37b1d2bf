"""The sizes of a decoder, as values; no tensors here."""

from __future__ import annotations

from dataclasses import dataclass

Windows = tuple[int | None, ...]
"""For each layer the number of positions a token sees, its own included; None for all."""


@dataclass(frozen=True, slots=True)
class Biases:
    """The linear layers that have a bias."""

    qkv: bool = False
    output: bool = False  # of the attention
    mlp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes and variants of one decoder."""

    architecture: str  # a key of `registry.ARCHITECTURES`
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int  # tokens of prompt and output that the model was made for
    tied_embeddings: bool  # the output layer's weight is the embedding's
    biases: Biases
    qk_norm: bool  # queries and keys are normed head by head
    windows: Windows  # [num_layers]

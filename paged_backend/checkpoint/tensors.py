"""The tensors that a checkpoint of a decoder holds: names, shapes and roles, without torch.

The capacity planner counts them, the loader checks files against them, and dummy weights are made
from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from paged_backend.checkpoint.shape import ModelShape


class Role(Enum):
    """What a model does with a tensor."""

    EMBEDDING = "embedding"  # looked up row by row; also the output layer where the two are tied
    HEAD = "head"  # an output layer that is separate from the embedding
    LINEAR = "linear"  # the weight of a linear layer
    BIAS = "bias"
    NORM = "norm"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a checkpoint.

    Attributes:
        shape: sizes of its dimensions.
        role: what the model does with it.
        shard: the dimension along which tensor-parallel ranks divide it; None if each rank needs
            the whole tensor.
    """

    shape: tuple[int, ...]
    role: Role
    shard: int | None = None

    @property
    def num_elements(self) -> int:
        """The product of all sizes."""
        return math.prod(self.shape)


Tensors = dict[str, TensorSpec]
"""Specifications by the names that Hugging Face gives the tensors."""


def decoder_tensors(shape: ModelShape) -> Tensors:
    """Return the tensors of a Llama-like decoder."""
    table = (shape.vocab_size, shape.hidden_size)
    tensors = {"model.embed_tokens.weight": TensorSpec(table, Role.EMBEDDING, shard=0)}
    if not shape.tied_embeddings:
        tensors["lm_head.weight"] = TensorSpec(table, Role.HEAD, shard=0)
    tensors["model.norm.weight"] = TensorSpec((shape.hidden_size,), Role.NORM)
    layer = dict(_layer_tensors(shape))
    for index in range(shape.num_layers):
        for name, spec in layer.items():
            tensors[f"model.layers.{index}.{name}"] = spec
    return tensors


def _layer_tensors(shape: ModelShape) -> Iterator[tuple[str, TensorSpec]]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    biases = shape.biases
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield f"{norm}.weight", TensorSpec((hidden,), Role.NORM)
    for name, size in (("q_proj", query), ("k_proj", key), ("v_proj", key)):
        yield from _linear(f"self_attn.{name}", hidden, size, biases.qkv, shard=0)
    yield from _linear("self_attn.o_proj", query, hidden, biases.output, shard=1)
    for name in ("gate_proj", "up_proj"):
        yield from _linear(f"mlp.{name}", hidden, inner, biases.mlp, shard=0)
    yield from _linear("mlp.down_proj", inner, hidden, biases.mlp, shard=1)
    if shape.qk_norm:
        for norm in ("q_norm", "k_norm"):
            yield f"self_attn.{norm}.weight", TensorSpec((shape.head_dim,), Role.NORM)


def _linear(
    name: str, inputs: int, outputs: int, bias: bool, shard: int
) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{name}.weight", TensorSpec((outputs, inputs), Role.LINEAR, shard)
    if bias:  # of a layer that is divided along its inputs, one rank adds the whole bias
        yield f"{name}.bias", TensorSpec((outputs,), Role.BIAS, shard=0 if shard == 0 else None)

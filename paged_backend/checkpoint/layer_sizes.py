"""What differs between the layers of a decoder whose layers have several shapes; no tensors here.

Gemma 4 has such layers: Google DeepMind, "Gemma 4" model card (2026), and "Gemma 3n" (2025) for
inputs of layers and for layers that share keys and values.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_backend.checkpoint.tensors import Role, Tensors, TensorSpec


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of a layer.

    Attributes:
        num_kv_heads: heads of keys and values.
        head_dim: size of a head.
        intermediate_size: size of a row between the projections of the MLP.
        shared_with: the number of an earlier layer with the same window and heads, that keeps the
            keys and values which this layer reads; None if it keeps its own.
        keys_as_values: the keys, before their norm and rotation, are also the values.
    """

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    shared_with: int | None = None
    keys_as_values: bool = False


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """A vector of each token for each layer, which is added after the layer's MLP.

    Attributes:
        vocab_size: number of tokens in the table of these vectors.
        size: size of a vector.
    """

    vocab_size: int
    size: int

    def model_tensors(self, hidden: int, num_layers: int) -> Tensors:
        """Return the tensors that all layers share, by their names in the checkpoint."""
        total = num_layers * self.size
        return {
            "model.embed_tokens_per_layer.weight": TensorSpec(
                (self.vocab_size, total), Role.LAYER_EMBEDDING
            ),
            "model.per_layer_model_projection.weight": TensorSpec((total, hidden), Role.LINEAR),
            "model.per_layer_projection_norm.weight": TensorSpec((self.size,), Role.NORM),
        }

    def layer_tensors(self, hidden: int) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of a layer, by their names in it; each rank has all of them."""
        for name, shape in self.parts(hidden).items():
            yield f"{name}.weight", TensorSpec(shape, Role.LINEAR)
        yield "post_per_layer_input_norm.weight", TensorSpec((hidden,), Role.NORM)

    def parts(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return the outputs and inputs of a layer's products, by name."""
        return {
            "per_layer_input_gate": (self.size, hidden),
            "per_layer_projection": (hidden, self.size),
        }

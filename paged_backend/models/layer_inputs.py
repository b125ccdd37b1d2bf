"""Inputs of layers: a vector of each token for each layer, added behind a gate (Gemma 3n and 4)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu

from paged_backend.checkpoint.layer_sizes import LayerInputs
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.layers import Kernels, NormWeights
from paged_backend.models.linear import LinearSpec

_NORM = "model.per_layer_projection_norm.weight"
_TABLE = "model.embed_tokens_per_layer.weight"
_PROJECTION = "per_layer_model_projection"


class LayerInputTable:
    """Computes the inputs of all layers from a table and from the embeddings of tokens.

    Args:
        inputs: the sizes of the inputs.
        config: the sizes of the model.
        kernels: the platform.
    """

    def __init__(self, inputs: LayerInputs, config: ModelConfig, kernels: Kernels) -> None:
        self._shape, self._eps = (config.num_layers, inputs.size), config.rms_norm_eps
        total = config.num_layers * inputs.size
        # The platform's table is that of tokens, which several ranks divide.
        self._table = torch.empty(
            inputs.vocab_size, total, dtype=kernels.dtype, device=kernels.device
        )
        spec = LinearSpec(config.hidden_size, {_PROJECTION: total}, prefix="model")
        self._projection = kernels.linear(spec)
        self._projection_scale = config.hidden_size**-0.5
        self._norm_weights = NormWeights(kernels, unit_offset=config.variant.unit_offset)
        self._norm = self._norm_weights.empty(inputs.size)
        self._rms_norm = kernels.layers.rms_norm
        # Rounded as transformers rounds it.
        self._scale = float(torch.tensor(inputs.size**0.5, dtype=kernels.dtype))

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name."""
        linear = self._projection.parameters()
        named = {f"model.{name}": parameter for name, parameter in linear.items()}
        return {_TABLE: self._table, _NORM: self._norm, **named}

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self._projection.pack()
        self._norm_weights.pack()

    def __call__(self, input_ids: Tensor, embeddings: Tensor) -> Tensor:
        """Compute the inputs [num_tokens, num_layers, size].

        Args:
            input_ids: [num_tokens] the tokens.
            embeddings: [num_tokens, hidden_size] their embeddings.
        """
        known = embedding(input_ids, self._table) * self._scale
        projected = self._projection(embeddings) * self._projection_scale
        normed = self._rms_norm(projected.reshape(-1, self._shape[1]), self._norm, self._eps)
        inputs: Tensor = (normed.view(known.shape) + known) * 0.5**0.5
        return inputs.view(-1, *self._shape)


class LayerInputGate:
    """The part of a layer that adds its input: projection(gelu(gate(x)) * input).

    Args:
        inputs: the sizes of the inputs.
        index: the layer's number.
        hidden_size: size of hidden states.
        prefix: the name of the layer in the checkpoint.
        kernels: the platform.
    """

    norm = "post_per_layer_input_norm"

    def __init__(
        self, inputs: LayerInputs, index: int, hidden_size: int, prefix: str, kernels: Kernels
    ) -> None:
        self._index = index
        self.reader, self.projection = (
            kernels.linear(LinearSpec(size, {name: outputs}, prefix=prefix))
            for name, (outputs, size) in inputs.parts(hidden_size).items()
        )

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the layer."""
        return self.reader.parameters() | self.projection.parameters()

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self.reader.pack()
        self.projection.pack()

    def apply(self, x: Tensor, inputs: Tensor) -> Tensor:
        """Compute what `projection` reads, [rows, size].

        Args:
            x: [rows, hidden_size] the hidden states.
            inputs: [rows, num_layers, size] the inputs of all layers.
        """
        return gelu(self.reader(x), approximate="tanh").mul_(inputs[:, self._index])

"""The multi-token prediction (MTP) layer of a checkpoint, which runs like a draft model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata, CachedLayer
from paged_backend.models.decoder import Decoder
from paged_backend.models.hidden_states import HiddenStates
from paged_backend.models.layers import Kernels, NormWeights
from paged_backend.models.linear import LinearSpec
from paged_backend.models.states import StateLayer


class PredictionLayer:
    """See :class:`~paged_backend.models.base.LoadableModel`.

    The row of token i reads the model's last hidden state of this token, and the embedding of token
    i + 1, which is its input. It predicts token i + 2. Its result takes the place of the hidden
    state of token i + 1 until the model computes that, so that the layer can go on from there.
    `read_from` must be called before `forward`.

    Args:
        config: the result of `checkpoint.prediction.prediction_layer`.
        max_model_len: tokens of the longest sequence.
        kernels: the platform.
    """

    head = None
    state_layers: Sequence[StateLayer] = ()

    def __init__(self, config: ModelConfig, max_model_len: int, kernels: Kernels) -> None:
        self.config = replace(config, has_output_layer=True)  # that of the model
        self.max_model_len = max_model_len
        assert config.prediction is not None
        self._names = names = config.prediction
        self._functions = kernels.layers
        hidden = config.hidden_size
        self._norm_weights = NormWeights(kernels, unit_offset=config.variant.unit_offset)
        self._embedding_norm = self._norm_weights.empty(hidden)
        self._hidden_norm = self._norm_weights.empty(hidden)
        self._projection = kernels.linear(LinearSpec(2 * hidden, {names.projection: hidden}))
        self._layer = Decoder(config, max_model_len, kernels)
        self._model: Decoder | None = None
        self._hidden: HiddenStates | None = None

    @property
    def attention_layers(self) -> Sequence[CachedLayer]:
        """The attention layer."""
        return self._layer.attention_layers

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        norms: dict[str, Parameter] = {
            f"{self._names.embedding_norm}.weight": self._embedding_norm,
            f"{self._names.hidden_norm}.weight": self._hidden_norm,
        }
        return self._layer.parameters() | norms | self._projection.parameters()

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self._layer.pack()
        self._norm_weights.pack()
        self._projection.pack()

    def read_from(self, model: Decoder, hidden: HiddenStates) -> None:
        """Set the model with the embedding and the output layer, and its hidden states."""
        self._model, self._hidden = model, hidden

    @property
    def weights(self) -> list[object]:
        """The objects that hold the weights of the layer, without those of the model."""
        return [self._norm_weights, self._projection, self._layer]

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run the layer, see `Model.forward`."""
        assert self._model is not None and self._hidden is not None
        eps, norm = self.config.rms_norm_eps, self._functions.rms_norm
        embeddings = norm(self._model.embed(input_ids), self._embedding_norm, eps)
        hidden = self._hidden.read(meta.slot_mappings[0])
        projected = self._projection(
            torch.cat((embeddings, norm(hidden, self._hidden_norm, eps)), dim=1)
        )
        result = self._layer.run_layers(projected, attention, meta, logits_indices)
        # In a step of a prompt, the next row may be in the step, too. It has been read by now.
        self._hidden.write(self._hidden.slots_after(meta, logits_indices), result)
        return result

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits with the output layer of the model, see `Model.compute_logits`."""
        assert self._model is not None
        return self._model.compute_logits(hidden)

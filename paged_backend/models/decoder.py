"""The decoder of all families that `Variant` describes, with MLPs or experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata, CachedLayer
from paged_backend.models.blocks import prefixed
from paged_backend.models.classifier import Classifier
from paged_backend.models.decoder_layer import DecoderLayer, Part
from paged_backend.models.embedding import EmbeddingMethod
from paged_backend.models.layer_inputs import LayerInputTable
from paged_backend.models.layers import Kernels, NormWeights
from paged_backend.models.linear import LinearMethod, LinearSpec
from paged_backend.models.mixer import Mixing
from paged_backend.models.shared_block import make_blocks
from paged_backend.models.states import StateLayer


class Decoder:
    """A decoder; see :class:`~paged_backend.models.base.Model`."""

    def __init__(self, config: ModelConfig, max_model_len: int, kernels: Kernels) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self._functions = kernels.layers
        vocab_size, hidden_size, stage = config.vocab_size, config.hidden_size, config.own_stage
        # None if tied: `embed` then reads the output layer's weight, which may be rounded. So the
        # first of several stages has that layer, too.
        self._embedding: EmbeddingMethod | None = None
        is_tied = config.has_output_layer and config.tied_embeddings
        if stage.is_first and not is_tied:
            self._embedding = kernels.embedding(vocab_size, hidden_size)
        # Rounded as transformers rounds it, because models are trained with the rounded number.
        scale = torch.tensor(config.variant.embedding_scale, dtype=kernels.dtype)
        self._embedding_scale = float(scale)
        self._layer_inputs: LayerInputTable | None = None
        if config.variant.layer_inputs is not None:
            self._layer_inputs = LayerInputTable(config.variant.layer_inputs, config, kernels)
        ropes = {index: config.ropes[index] for index in stage.layers}
        tables = {rope: rope.table(max_model_len, kernels.device) for rope in set(ropes.values())}
        self._blocks = make_blocks(config, kernels)
        self._layers = {
            index: DecoderLayer(
                config,
                index,
                config.layer_name(index),
                tables[rope],
                kernels,
                self._blocks.get(index),
            )
            for index, rope in ropes.items()
        }
        self._norm_weights = NormWeights(kernels, unit_offset=config.variant.unit_offset)
        self._norm = self._norm_weights.empty(hidden_size) if stage.is_last else None
        self._lm_head: LinearMethod | None = None
        if config.has_output_layer and (stage.is_last or (is_tied and stage.is_first)):
            name = "model.embed_tokens" if is_tied else "lm_head"
            self._lm_head = kernels.linear(LinearSpec(hidden_size, {name: vocab_size}))
        self.head: Classifier | None = None
        if config.classifier is not None:
            self.head = Classifier(
                hidden_size,
                vocab_size,
                config.classifier,
                tied=config.tied_embeddings,
                device=kernels.device,
            )

    @property
    def _mixings(self) -> Iterator[Mixing]:
        layers = (layer.mixing for layer in self._layers.values())
        return (mixing for mixing in layers if mixing is not None)

    @property
    def attention_layers(self) -> Sequence[CachedLayer]:
        """The attention layers, in order."""
        kept = (mixing.kept_tokens for mixing in self._mixings)
        return [layer for layer in kept if layer is not None]

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """The layers that keep a state for each sequence, in order."""
        kept = (mixing.kept_state for mixing in self._mixings)
        return [layer for layer in kept if layer is not None]

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        parameters: dict[str, Parameter] = {}
        if self._norm is not None:
            parameters[f"{self.config.final_norm}.weight"] = self._norm
        if self._lm_head is not None:
            parameters |= self._lm_head.parameters()
        if self._embedding is not None:
            parameters["model.embed_tokens.weight"] = self._embedding.table
        if self._layer_inputs is not None:
            parameters |= self._layer_inputs.parameters()
        if self.head is not None:
            parameters |= self.head.parameters()
        for block in dict.fromkeys(self._blocks.values()):
            parameters |= block.parameters()
        for index, layer in self._layers.items():
            parameters |= prefixed(self.config.layer_name(index), layer.parameters())
        return parameters

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        for block in dict.fromkeys(self._blocks.values()):
            block.pack()
        for layer in self._layers.values():
            layer.pack()
        keepers = {layer.index: layer for layer in self.attention_layers}
        for layer in self._layers.values():
            layer.share(keepers)
        if self._layer_inputs is not None:
            self._layer_inputs.pack()
        self._parts = [part for layer in self._layers.values() for part in layer.parts()]
        mixing = (number for number, part in enumerate(self._parts) if part.mixing is not None)
        self._last_mixing = max(mixing, default=0)
        self._norm_weights.pack()
        if self._lm_head is not None:
            self._lm_head.pack()
        if self.head is not None and self._embedding is not None:
            self.head.pack(self._embedding)

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Compute the last hidden states, see `Model.forward`."""
        hidden = self.embed(input_ids)
        inputs = None if self._layer_inputs is None else self._layer_inputs(input_ids, hidden)
        return self._run(hidden, inputs, attention, meta, logits_indices)

    def run_layers(
        self,
        hidden: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run the layers from the first one's input on, see `models.stage_model.Divisible`."""
        return self._run(hidden, None, attention, meta, logits_indices)

    def _run(
        self,
        hidden: Tensor,
        inputs: Tensor | None,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run the layers.

        Args:
            hidden: [num_tokens, hidden_size] hidden states before the layers; they change.
            inputs: [num_tokens, num_layers, size] the inputs of layers; None without any.
            attention: see `Model.forward`.
            meta: see `Model.forward`.
            logits_indices: see `Model.forward`.
        """
        parts = self._parts
        nexts = [*((part.norm, part.reader) for part in parts[1:]), (self._norm, None)]
        embeddings = hidden.clone() if self._blocks else None
        x = self._normed(hidden, parts[0].norm)
        for number, (part, following) in enumerate(zip(parts, nexts, strict=True)):
            if part.residual is not None:
                hidden = x * part.residual[0]
            if part.reads_embeddings and embeddings is not None:
                x = torch.cat((x, embeddings), dim=1)
            if part.mixing is not None:
                x = part.mixing.mix(x, attention, meta)
            if number == self._last_mixing and logits_indices is not None:  # others are not read
                x, hidden = x[logits_indices], hidden[logits_indices]
                attention.cut_rows()
                inputs = None if inputs is None else inputs[logits_indices]
            if part.gate is not None and inputs is not None:
                x = part.gate.apply(x, inputs)
            x = self._add(hidden, part, x, following)
        return x

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Compute logits [num_rows, vocab_size] in the model's dtype from `forward`'s result."""
        logits, variant = self._output_layer(hidden), self.config.variant
        if variant.logits_scale != 1:
            logits *= variant.logits_scale
        if variant.logits_softcap is not None:
            logits = logits.div_(variant.logits_softcap).tanh_().mul_(variant.logits_softcap)
        return logits

    @property
    def _output_layer(self) -> LinearMethod:
        if self._lm_head is None:
            raise TypeError("the model was loaded without its output layer")
        return self._lm_head

    def embed(self, input_ids: Tensor) -> Tensor:
        """Compute the tokens' embeddings [num_tokens, hidden_size]."""
        if self._embedding is None:
            hidden = self._output_layer.rows(input_ids)
        else:
            hidden = self._embedding.rows(input_ids)
        return hidden if self._embedding_scale == 1 else hidden * self._embedding_scale

    def _add(
        self,
        hidden: Tensor,
        part: Part,
        x: Tensor,
        following: tuple[Tensor | None, LinearMethod | None],
    ) -> Tensor:
        """Add the output of a layer's part to `hidden` in place; returns what the next one reads.

        Args:
            hidden: [rows, hidden_size].
            part: the part.
            x: the input of its last product, or of all of it.
            following: the weight of the norm that the next part begins with, None for no norm; and
                the layer that alone reads the norm, if there is only one.
        """
        next_norm, reader = following
        variant, eps = self.config.variant, self.config.rms_norm_eps
        scale = variant.residual_scale if part.residual is None else part.residual[1]
        fuses = part.output_norm is None and part.scalar is None and scale == 1
        if fuses and next_norm is not None:
            return self._functions.add_norm(hidden, part.output, x, next_norm, eps, reader)
        output = self._normed(part.output(x), part.output_norm)
        hidden.add_(output, alpha=scale)
        if part.scalar is not None:
            hidden.mul_(part.scalar)
        return self._normed(hidden, next_norm)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return self._functions.rms_norm(x, weight, self.config.rms_norm_eps)

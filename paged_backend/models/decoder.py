"""The decoder of all families that `Variant` describes, with MLPs or experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paged_backend.checkpoint.mixers import DeltaShape, ShortConvShape
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata, CachedLayer
from paged_backend.models.blocks import Attention, GatedMLP, prefixed
from paged_backend.models.classifier import Classifier
from paged_backend.models.delta import GatedDelta
from paged_backend.models.embedding import EmbeddingMethod
from paged_backend.models.latent import LatentAttention
from paged_backend.models.layers import Kernels, NormWeights
from paged_backend.models.linear import LinearMethod, LinearSpec, RowFunction
from paged_backend.models.mixer import Mixer
from paged_backend.models.moe import MoeMLP
from paged_backend.models.short_conv import ShortConv
from paged_backend.models.states import StateLayer


class DecoderLayer:
    """The weights of one layer.

    Attributes:
        mixer: the attention, or what is in its place.
        mlp: the MLP, or the experts in its place.
        norms: the weights of the norms by their names in the checkpoint.
    """

    def __init__(
        self, config: ModelConfig, index: int, prefix: str, cos_sin_cache: Tensor, kernels: Kernels
    ) -> None:
        self._norm_weights = NormWeights(kernels, unit_offset=config.variant.unit_offset)
        names = config.variant.norms.names
        self.norms = {name: self._norm_weights.empty(config.hidden_size) for name in names}
        self.mixer = _make_mixer(config, index, prefix, cos_sin_cache, kernels)
        moe = config.moe_of(index)
        self._mlp_name = "mlp" if moe is None else moe.names.module
        self.mlp: GatedMLP | MoeMLP
        if moe is None:
            self.mlp = GatedMLP(config, f"{prefix}.mlp", kernels)
        else:
            self.mlp = MoeMLP(moe, f"{prefix}.{self._mlp_name}", kernels)

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the layer."""
        return {
            **{f"{name}.weight": weight for name, weight in self.norms.items()},
            **prefixed(self.mixer.name, self.mixer.parameters()),
            **prefixed(self._mlp_name, self.mlp.parameters()),
        }

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self._norm_weights.pack()
        self.mixer.pack()
        self.mlp.pack()

    def norm(self, name: str | None) -> Tensor | None:
        """Return the weight of a norm; None if the name is."""
        return None if name is None else self.norms[name]


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
        ropes = {index: config.ropes[index] for index in stage.layers}
        tables = {rope: rope.table(max_model_len, kernels.device) for rope in set(ropes.values())}
        self._layers = {
            index: DecoderLayer(config, index, _layer(index), tables[rope], kernels)
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
    def attention_layers(self) -> Sequence[CachedLayer]:
        """The attention layers, in order."""
        kept = (layer.mixer.kept_tokens for layer in self._layers.values())
        return [layer for layer in kept if layer is not None]

    @property
    def state_layers(self) -> Sequence[StateLayer]:
        """The layers that keep a state for each sequence, in order."""
        kept = (layer.mixer.kept_state for layer in self._layers.values())
        return [layer for layer in kept if layer is not None]

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name; invalid after `pack`."""
        parameters: dict[str, Parameter] = {}
        if self._norm is not None:
            parameters["model.norm.weight"] = self._norm
        if self._lm_head is not None:
            parameters |= self._lm_head.parameters()
        if self._embedding is not None:
            parameters["model.embed_tokens.weight"] = self._embedding.table
        if self.head is not None:
            parameters |= self.head.parameters()
        for index, layer in self._layers.items():
            parameters |= prefixed(_layer(index), layer.parameters())
        return parameters

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        for layer in self._layers.values():
            layer.pack()
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
        return self.run_layers(self.embed(input_ids), attention, meta, logits_indices)

    def run_layers(
        self,
        hidden: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run the layers from the first one's input on, see `models.stage_model.Divisible`."""
        names = self.config.variant.norms
        layers = list(self._layers.values())
        nexts: list[tuple[Tensor | None, LinearMethod | None]] = [
            (layer.norm(names.attention_input), layer.mixer.reader) for layer in layers[1:]
        ]
        nexts.append((self._norm, None))
        x = self._normed(hidden, layers[0].norm(names.attention_input))
        for layer, next_input in zip(layers, nexts, strict=True):
            attended = layer.mixer.mix(x, attention, meta)
            if layer is layers[-1] and logits_indices is not None:  # only these rows matter
                attended, hidden = attended[logits_indices], hidden[logits_indices]
            output, mlp_input = layer.norm(names.attention_output), layer.norm(names.mlp_input)
            o_proj, reader = layer.mixer.o_proj, layer.mlp.reader
            x = self._add(hidden, o_proj, attended, output, (mlp_input, reader))
            x = self._add(hidden, layer.mlp, x, layer.norm(names.mlp_output), next_input)
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
        part: RowFunction,
        x: Tensor,
        output_norm: Tensor | None,
        following: tuple[Tensor | None, LinearMethod | None],
    ) -> Tensor:
        """Add the output of a layer's part to `hidden` in place; returns what the next one reads.

        Args:
            hidden: [rows, hidden_size].
            part: the part, or its last product.
            x: its input.
            output_norm: the weight of the norm of the output; None for no norm.
            following: the weight of the norm that the next part begins with, None for no norm; and
                the layer that alone reads the norm, if there is only one.
        """
        next_norm, reader = following
        variant, eps = self.config.variant, self.config.rms_norm_eps
        if output_norm is None and next_norm is not None and variant.residual_scale == 1:
            return self._functions.add_norm(hidden, part, x, next_norm, eps, reader)
        output = self._normed(part(x), output_norm)
        hidden.add_(output, alpha=variant.residual_scale)
        return self._normed(hidden, next_norm)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return self._functions.rms_norm(x, weight, self.config.rms_norm_eps)


def _make_mixer(
    config: ModelConfig, index: int, prefix: str, cos_sin_cache: Tensor, kernels: Kernels
) -> Mixer:
    """Return the attention of a layer, or what it has in place of it."""
    shape = config.variant.state_mixer_of(index)
    match shape:
        case DeltaShape():
            return GatedDelta(shape, index, prefix, config.rms_norm_eps, kernels)
        case ShortConvShape():
            return ShortConv(shape, index, prefix, kernels)
    attention = Attention if config.variant.latent is None else LatentAttention
    return attention(config, index, prefix, cos_sin_cache, kernels)


def _layer(index: int) -> str:
    """Return the name of a layer in the checkpoint."""
    return f"model.layers.{index}"

"""The decoder of all families that `Variant` describes, with MLPs or experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.checkpoint.mixers import (
    DeltaShape,
    KimiDeltaShape,
    LightningShape,
    Mamba1Shape,
    Mamba2Shape,
    RgLruShape,
    ShortConvShape,
)
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionBackend, AttentionMetadata, CachedLayer
from paged_backend.models.blocks import Attention, GatedMLP, PlainMLP, prefixed
from paged_backend.models.classifier import Classifier
from paged_backend.models.delta import GatedDelta
from paged_backend.models.embedding import EmbeddingMethod
from paged_backend.models.kimi_delta import KimiDelta
from paged_backend.models.latent import LatentAttention
from paged_backend.models.layers import Kernels, NormWeights
from paged_backend.models.lightning import LightningAttention
from paged_backend.models.linear import LinearMethod, LinearSpec, RowFunction
from paged_backend.models.mamba1 import Mamba1
from paged_backend.models.mamba2 import Mamba2
from paged_backend.models.mixer import Mixer, Mixing
from paged_backend.models.moe import MoeMLP, SummedMLPs
from paged_backend.models.parallel_mixers import ParallelMixers
from paged_backend.models.rg_lru import RgLru
from paged_backend.models.short_conv import ShortConv
from paged_backend.models.states import StateLayer


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a layer; its output is added to the hidden states.

    Attributes:
        norm: the weight of the norm that it begins with; None for no norm.
        mixing: mixes tokens; None for a part that computes each row for itself.
        output: computes the output from the norm, or from what `mixing` returns.
        reader: the layer that alone reads the norm, if there is only one.
        output_norm: the weight of the norm of the output; None for no norm.
        residual: factors on what the part reads and on its output, the sum of which becomes the
            hidden states; None if the output is added to them.
    """

    norm: Tensor | None
    mixing: Mixing | None
    output: RowFunction
    reader: LinearMethod | None
    output_norm: Tensor | None
    residual: tuple[float, float] | None = None


class DecoderLayer:
    """The weights of one layer.

    Attributes:
        mixing: the attention, or what is in its place; None for a layer without.
        mlp: the MLP, or the experts in its place or beside it; None for a layer without.
        norms: the weights of the norms by their names in the checkpoint.
    """

    def __init__(
        self, config: ModelConfig, index: int, prefix: str, cos_sin_cache: Tensor, kernels: Kernels
    ) -> None:
        self._norm_weights = NormWeights(kernels, unit_offset=config.variant.unit_offset)
        self._names = config.variant.norms_of(index)
        self._residual = config.variant.residual_factors
        sizes = dict.fromkeys(self._names.names, config.hidden_size)
        self.norms = {name: self._norm_weights.empty(size) for name, size in sizes.items()}
        self._mixers = _make_mixers(config, index, prefix, cos_sin_cache, kernels)
        self.mixing = _in_parallel(config, index, self._mixers)
        self._mlps = _make_mlps(config, index, prefix, kernels)
        self.mlp = _sum_of(list(self._mlps.values()))

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the layer."""
        parameters: dict[str, Parameter] = {}
        for mixer in self._mixers:
            parameters |= prefixed(mixer.name, mixer.parameters())
        for name, mlp in self._mlps.items():
            parameters |= prefixed(name, mlp.parameters())
        return {f"{name}.weight": weight for name, weight in self.norms.items()} | parameters

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self._norm_weights.pack()
        for mixer in self._mixers:
            mixer.pack()
        for mlp in self._mlps.values():
            mlp.pack()

    def parts(self) -> Iterator[Part]:
        """Yield the parts in the order in which they are computed, after `pack`."""
        names, mixing, mlp = self._names, self.mixing, self.mlp
        factors = self._residual
        if mixing is not None:
            norms = self._norm(names.attention_input), self._norm(names.attention_output)
            residual = None
            if factors is not None:
                residual = factors.state if mixing.kept_state else factors.attention
            reader = mixing.reader if factors is None else None  # hidden states are made of it, too
            yield Part(norms[0], mixing, mixing.o_proj, reader, norms[1], residual)
        if mlp is not None:
            norms = self._norm(names.mlp_input), self._norm(names.mlp_output)
            residual = None if factors is None else factors.mlp
            reader = mlp.reader if factors is None else None
            yield Part(norms[0], None, mlp, reader, norms[1], residual)

    def _norm(self, name: str | None) -> Tensor | None:
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
            name = self.config.variant.names.final_norm
            parameters[f"model.{name}.weight"] = self._norm
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
        return self.run_layers(self.embed(input_ids), attention, meta, logits_indices)

    def run_layers(
        self,
        hidden: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run the layers from the first one's input on, see `models.stage_model.Divisible`."""
        parts = self._parts
        nexts = [*((part.norm, part.reader) for part in parts[1:]), (self._norm, None)]
        x = self._normed(hidden, parts[0].norm)
        for number, (part, following) in enumerate(zip(parts, nexts, strict=True)):
            if part.residual is not None:
                hidden = x * part.residual[0]
            if part.mixing is not None:
                x = part.mixing.mix(x, attention, meta)
            if number == self._last_mixing and logits_indices is not None:  # others are not read
                x, hidden = x[logits_indices], hidden[logits_indices]
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
        if part.output_norm is None and next_norm is not None and scale == 1:
            return self._functions.add_norm(hidden, part.output, x, next_norm, eps, reader)
        output = self._normed(part.output(x), part.output_norm)
        hidden.add_(output, alpha=scale)
        return self._normed(hidden, next_norm)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        return self._functions.rms_norm(x, weight, self.config.rms_norm_eps)


def _make_mlps(
    config: ModelConfig, index: int, prefix: str, kernels: Kernels
) -> dict[str, GatedMLP | MoeMLP | PlainMLP]:
    """Return the experts of a layer and its MLP, by their names in it; it may lack either."""
    mlps: dict[str, GatedMLP | MoeMLP | PlainMLP] = {}
    if not config.variant.has_mlp(index):
        return mlps
    moe = config.moe_of(index)
    if moe is not None:
        mlps[moe.names.module] = MoeMLP(moe, f"{prefix}.{moe.names.module}", kernels)
    if moe is None or moe.beside_mlp:
        make = PlainMLP if config.variant.plain_mlp else GatedMLP
        name = config.variant.names.mlp
        mlps[name] = make(config, f"{prefix}.{name}", kernels)
    return mlps


def _sum_of(
    mlps: list[GatedMLP | MoeMLP | PlainMLP],
) -> GatedMLP | MoeMLP | PlainMLP | SummedMLPs | None:
    """Return one or two modules as one; None for no module."""
    if len(mlps) < 2:
        return mlps[0] if mlps else None
    return SummedMLPs(*mlps)


def _make_mixers(
    config: ModelConfig, index: int, prefix: str, cos_sin_cache: Tensor, kernels: Kernels
) -> list[Mixer]:
    """Return what a layer has in place of attention or beside it, and then its attention."""
    mixers: list[Mixer] = []
    shape, eps = config.variant.state_mixer_of(index), config.rms_norm_eps
    match shape:
        case DeltaShape():
            mixers.append(GatedDelta(shape, index, prefix, eps, kernels))
        case KimiDeltaShape():
            mixers.append(KimiDelta(shape, index, prefix, eps, kernels))
        case LightningShape():
            mixers.append(LightningAttention(shape, index, prefix, kernels))
        case Mamba1Shape():
            mixers.append(Mamba1(shape, index, prefix, eps, kernels))
        case Mamba2Shape():
            mixers.append(Mamba2(shape, index, prefix, eps, kernels))
        case RgLruShape():
            mixers.append(RgLru(shape, index, prefix, kernels))
        case ShortConvShape():
            mixers.append(ShortConv(shape, index, prefix, kernels))
    if config.variant.has_attention(index):
        attention = Attention if config.variant.latent is None else LatentAttention
        mixers.append(attention(config, index, prefix, cos_sin_cache, kernels))
    return mixers


def _in_parallel(config: ModelConfig, index: int, mixers: list[Mixer]) -> Mixing | None:
    """Return one or two modules as one; None for no module."""
    shape = config.variant.state_mixer_of(index)
    if shape is None or len(mixers) < 2:
        return mixers[0] if mixers else None
    state, attention = mixers
    return ParallelMixers(state, shape.values_size, attention, config.variant.factors)


def _layer(index: int) -> str:
    """Return the name of a layer in the checkpoint."""
    return f"model.layers.{index}"

"""One layer of the decoder of `models.decoder`: what mixes tokens, an MLP or experts, and norms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paged_backend.checkpoint.mamba import Mamba1Shape, Mamba2Shape
from paged_backend.checkpoint.mixers import (
    DeltaShape,
    KimiDeltaShape,
    LightningShape,
    RgLruShape,
    ShortConvShape,
)
from paged_backend.checkpoint.model_config import ModelConfig
from paged_backend.checkpoint.stored_tensor import Parameter
from paged_backend.models.attention import AttentionLayer, CachedLayer
from paged_backend.models.blocks import Attention, GatedMLP, PlainMLP, prefixed
from paged_backend.models.delta import GatedDelta
from paged_backend.models.kimi_delta import KimiDelta
from paged_backend.models.latent import LatentAttention
from paged_backend.models.layer_inputs import LayerInputGate
from paged_backend.models.layers import Kernels, NormWeights
from paged_backend.models.lightning import LightningAttention
from paged_backend.models.linear import LinearMethod, RowFunction
from paged_backend.models.mamba1 import Mamba1
from paged_backend.models.mamba2 import Mamba2
from paged_backend.models.mixer import Mixer, Mixing
from paged_backend.models.moe import MoeMLP, SummedMLPs
from paged_backend.models.parallel_mixers import ParallelMixers
from paged_backend.models.rg_lru import RgLru
from paged_backend.models.shared_block import BlockBeforeState, BlockUse, SharedBlock
from paged_backend.models.short_conv import ShortConv


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a layer; its output is added to the hidden states.

    Attributes:
        norm: the weight of the norm that it begins with; None for no norm.
        mixing: mixes tokens; None for a part that computes each row for itself.
        output: computes the output from the norm, or from what `mixing` returns.
        reader: the layer that alone reads the norm, if there is only one.
        output_norm: the weight of the norm of the output; None for no norm.
        reads_embeddings: `mixing` reads the hidden states, and behind them the tokens' embeddings.
        residual: factors on what the part reads and on its output, the sum of which becomes the
            hidden states; None if the output is added to them.
        gate: computes what `output` reads, from the norm and an input of the layer; None for a
            part without such an input.
        scalar: [1], factor on the hidden states after the part; None for no factor.
    """

    norm: Tensor | None
    mixing: Mixing | None
    output: RowFunction
    reader: LinearMethod | None
    output_norm: Tensor | None
    reads_embeddings: bool = False
    residual: tuple[float, float] | None = None
    gate: LayerInputGate | None = None
    scalar: Tensor | None = None


class DecoderLayer:
    """The weights of one layer.

    Attributes:
        mixing: the attention, or what is in its place; None for a layer without.
        mlp: the MLP, or the experts in its place or beside it; None for a layer without.
        norms: the weights of the norms by their names in the checkpoint.
    """

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        prefix: str,
        cos_sin_cache: Tensor,
        kernels: Kernels,
        block: SharedBlock | None = None,
    ) -> None:
        self._norm_weights = NormWeights(kernels, unit_offset=config.variant.unit_offset)
        self._names = config.variant.norms_of(index)
        self._residual = config.variant.residual_factors
        sizes = dict.fromkeys(self._names.names, config.hidden_size)
        self._gate: LayerInputGate | None = None
        if config.variant.layer_inputs is not None:
            self._gate = LayerInputGate(
                config.variant.layer_inputs, index, config.hidden_size, prefix, kernels
            )
            sizes[self._gate.norm] = config.hidden_size
        self.norms = {name: self._norm_weights.empty(size) for name, size in sizes.items()}
        self._scalar: Tensor | None = None
        if config.variant.layer_scalars:
            self._scalar = torch.empty(1, dtype=kernels.dtype, device=kernels.device)
        self._mixers = _make_mixers(config, index, prefix, cos_sin_cache, kernels, block)
        self.mixing = _in_parallel(config, index, self._mixers)
        self._uses_block = block is not None
        if self._uses_block:
            (name,) = self._names.names
            self.mixing = _after_block(self._mixers, self.norms[name], config, kernels)
        self._mlps = _make_mlps(config, index, prefix, kernels)
        self.mlp = _sum_of(list(self._mlps.values()))

    def parameters(self) -> dict[str, Parameter]:
        """Return the weight tensors to fill, by checkpoint name relative to the layer."""
        parameters: dict[str, Parameter] = {}
        for mixer in self._mixers:
            parameters |= prefixed(mixer.name, mixer.parameters())
        for name, mlp in self._mlps.items():
            parameters |= prefixed(name, mlp.parameters())
        if self._gate is not None:
            parameters |= self._gate.parameters()
        if self._scalar is not None:
            parameters["layer_scalar"] = self._scalar
        return {f"{name}.weight": weight for name, weight in self.norms.items()} | parameters

    def pack(self) -> None:
        """Bring the filled weights into the form that the platform's kernels read."""
        self._norm_weights.pack()
        for mixer in self._mixers:
            mixer.pack()
        for mlp in self._mlps.values():
            mlp.pack()
        if self._gate is not None:
            self._gate.pack()

    def share(self, keepers: Mapping[int, CachedLayer]) -> None:
        """Let attention read what another layer keeps, after `pack` of both.

        Args:
            keepers: the layers that keep keys and values, by their numbers.
        """
        for mixer in self._mixers:
            if isinstance(mixer, Attention) and not mixer.layer.keeps_tokens:
                keeper = keepers[mixer.layer.keeper]
                assert isinstance(keeper, AttentionLayer)
                mixer.share(keeper)

    def parts(self) -> Iterator[Part]:
        """Yield the parts in the order in which they are computed, after `pack`."""
        *others, last = self._all_parts()
        yield from others
        yield replace(last, scalar=self._scalar)

    def _all_parts(self) -> Iterator[Part]:
        names, mixing, mlp = self._names, self.mixing, self.mlp
        factors = self._residual
        if mixing is not None:
            norms = self._norm(names.attention_input), self._norm(names.attention_output)
            residual = None
            if factors is not None:
                residual = factors.state if mixing.kept_state else factors.attention
            reader = mixing.reader if factors is None else None  # hidden states are made of it, too
            if self._uses_block:
                yield Part(None, mixing, mixing.o_proj, None, None, reads_embeddings=True)
            else:
                yield Part(norms[0], mixing, mixing.o_proj, reader, norms[1], residual=residual)
        if mlp is not None:
            norms = self._norm(names.mlp_input), self._norm(names.mlp_output)
            residual = None if factors is None else factors.mlp
            reader = mlp.reader if factors is None else None
            yield Part(norms[0], None, mlp, reader, norms[1], residual=residual)
        if self._gate is not None:
            norm = self.norms[self._gate.norm]
            yield Part(None, None, self._gate.projection, None, norm, gate=self._gate)

    def _norm(self, name: str | None) -> Tensor | None:
        """Return the weight of a norm; None if the name is."""
        return None if name is None else self.norms[name]


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
        mlps[name] = make(config, index, f"{prefix}.{name}", kernels)
    return mlps


def _sum_of(
    mlps: list[GatedMLP | MoeMLP | PlainMLP],
) -> GatedMLP | MoeMLP | PlainMLP | SummedMLPs | None:
    """Return one or two modules as one; None for no module."""
    if len(mlps) < 2:
        return mlps[0] if mlps else None
    return SummedMLPs(*mlps)


def _make_mixers(
    config: ModelConfig,
    index: int,
    prefix: str,
    cos_sin_cache: Tensor,
    kernels: Kernels,
    block: SharedBlock | None,
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
    if block is not None:
        mixers.append(BlockUse(config, index, prefix, cos_sin_cache, kernels, block))
    elif config.variant.has_attention(index):
        attention = Attention if config.variant.latent is None else LatentAttention
        mixers.append(attention(config, index, prefix, cos_sin_cache, kernels))
    return mixers


def _in_parallel(config: ModelConfig, index: int, mixers: list[Mixer]) -> Mixing | None:
    """Return one or two modules as one; None for no module."""
    shape = config.variant.state_mixer_of(index)
    if shape is None or len(mixers) < 2 or not config.variant.parallel_mixers:
        return mixers[0] if mixers else None
    state, attention = mixers
    return ParallelMixers(state, shape.values_size, attention, config.variant.factors)


def _after_block(
    mixers: list[Mixer], norm: Tensor, config: ModelConfig, kernels: Kernels
) -> BlockBeforeState:
    """Return a module with a state, and before it the use of a shared block, as one."""
    state, use = mixers
    assert isinstance(use, BlockUse)
    return BlockBeforeState(use, state, norm, config.rms_norm_eps, kernels)

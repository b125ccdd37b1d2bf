"""Parameters, bytes and operations that follow from a decoder's shape."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from paged_backend.checkpoint.mixer_shares import divide_mixers
from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.stages import Stage
from paged_backend.checkpoint.tensors import Role
from paged_backend.tools.plan.number_types import KvType, WeightType
from paged_backend.values.kv_cache_groups import (
    NO_LAYERS,
    KVCacheGroup,
    KVSizes,
    group_layers,
    group_layers_of_stage,
)
from paged_backend.values.windows import Chunks, Window, num_visible, window_size


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts of a checkpoint, by their use."""

    embedding: int  # looked up; also the output layer if the two are tied
    layer_embedding: int  # looked up only
    linear: int  # weights of the linear layers in all decoder layers
    head: int  # weights of a separate output layer; 0 if it is tied
    rest: int  # norms, biases and routers
    experts: int = 0  # weights of the experts in all decoder layers, of which a token uses some

    @property
    def total(self) -> int:
        """The total number of parameters."""
        looked_up = self.embedding + self.layer_embedding
        return looked_up + self.linear + self.experts + self.head + self.rest

    def bytes(self, weights: WeightType) -> int:
        """The bytes of the whole checkpoint in memory."""
        # A GPU dequantizes experts.
        rest = self.embedding + self.layer_embedding + self.rest + self.experts
        rest_bits = rest * weights.rest_bits
        head_bits = self.head * (weights.head_bits or weights.rest_bits)
        return round((self.linear * weights.bits + head_bits + rest_bits) / 8)

    def head_bytes(self, weights: WeightType) -> int:
        """The bytes of the output layer, which may be the embedding."""
        if self.head:
            return round(self.head * (weights.head_bits or weights.rest_bits) / 8)
        return self.embedding * weights.rest_bits // 8

    def bytes_of_step(self, weights: WeightType, share_of_experts: float = 1.0) -> int:
        """The bytes that a step reads if its tokens choose a share of the experts.

        Of an untied embedding, only a few rows are read.
        """
        unread = self.layer_embedding + (self.embedding if self.head else 0)
        unread_bits = unread * weights.rest_bits
        unread_bits += round(self.experts * (1 - share_of_experts) * weights.rest_bits)
        return self.bytes(weights) - unread_bits // 8


def count_parameters(shape: ModelShape) -> Parameters:
    """Count the parameters of a checkpoint of this shape."""
    count: Counter[Role] = Counter()
    for spec in tensors_of(shape).values():
        count[spec.role] += spec.num_elements
    roles = Role.EMBEDDING, Role.LAYER_EMBEDDING, Role.LINEAR, Role.HEAD, Role.EXPERT
    embedding, table, linear, head, experts = (count.pop(role, 0) for role in roles)
    return Parameters(embedding, table, linear, head, count.total(), experts)


def share_of_experts(shape: ModelShape, num_tokens: float) -> float:
    """The share of the experts that a step of some tokens reads."""
    return 1.0 if shape.moe is None else shape.moe.share_of_experts(num_tokens)


@dataclass(frozen=True, slots=True)
class KvSizes:
    """Bytes of keys and values on each of the GPUs that share the heads."""

    layers: tuple[int, ...]  # per token in each layer that keeps something
    windows: tuple[Window | None, ...]  # window of each of these layers; None: no limit
    kept: tuple[KVSizes, ...]  # what each of these layers keeps in the whole model
    read: tuple[tuple[int, Window | None], ...]  # bytes and window of each layer with attention

    @classmethod
    def of(cls, shape: ModelShape, kv: KvType, num_gpus: int = 1) -> KvSizes:
        """Compute the sizes; with more GPUs than KV heads, several GPUs hold the same head."""

        def layer_bytes(layer: int) -> int:
            kept = shape.kept_of(layer)
            kept = kept._replace(num_heads=max(1, kept.num_heads // num_gpus))
            return (kept.numbers * kv.bits + kept.vectors * kv.scale_bits) // 8

        keeping = shape.keeping_layers
        return cls(
            tuple(map(layer_bytes, keeping)),
            tuple(shape.windows[layer] for layer in keeping),
            tuple(map(shape.kept_of, keeping)),
            tuple((layer_bytes(layer), shape.windows[layer]) for layer in shape.attention_layers),
        )

    @property
    def bytes_per_token(self) -> int:
        """The bytes per token in all layers together."""
        return sum(self.layers)

    def groups(self, max_model_len: int, stage: range | None = None) -> tuple[KVCacheGroup, ...]:
        """Return the groups of the layers that keep something.

        Args:
            max_model_len: tokens of the longest sequence.
            stage: the places of the layers of one of several stages; None for all.
        """
        if not self.layers:
            return NO_LAYERS
        if stage is None:
            return group_layers(self.windows, max_model_len, self.kept)
        return group_layers_of_stage(self.windows, max_model_len, stage, self.kept)

    def block_bytes(self, groups: Sequence[KVCacheGroup], block_size: int) -> int:
        """The bytes of a block of `block_size` tokens in all layers of the largest group."""
        return block_size * max(sum(self.layers[layer] for layer in each.layers) for each in groups)

    def bytes_seen(self, num_tokens: float) -> float:
        """The bytes that the last of `num_tokens` tokens attends to in each layer's window."""
        return sum(size * num_visible(num_tokens, window) for size, window in self.read)


def state_bytes(
    shape: ModelShape, weights: WeightType, num_gpus: int = 1, stage: Stage | None = None
) -> int:
    """Return the bytes of a sequence's state, which layers keep in place of keys and values.

    Args:
        shape: the model.
        weights: the number format of weights.
        num_gpus: the GPUs that divide each layer; the result is for each of them.
        stage: the layers that count; None for all.
    """
    mixers = divide_mixers(shape.variant.state_mixers, num_gpus)
    layers = (stage or shape.own_stage).layers
    kept = [mixer.kept_numbers for mixer in mixers[layers.start : layers.stop] if mixer is not None]
    return sum(own * weights.rest_bits // 8 + 4 * exact for own, exact in kept)


def attention_flops(shape: ModelShape, num_tokens: float) -> float:
    """Attention FLOPs (all layers and heads) for the last of `num_tokens` tokens."""
    return sum(
        _flops_of_key(shape, layer) * num_visible(num_tokens, shape.windows[layer])
        for layer in shape.attention_layers
    )


def prompt_attention_flops(shape: ModelShape, num_tokens: int) -> float:
    """Attention FLOPs for a whole prompt; each token attends to itself and those before it."""
    return sum(
        _flops_of_key(shape, layer) * _pairs(num_tokens, shape.windows[layer])
        for layer in shape.attention_layers
    )


def _flops_of_key(shape: ModelShape, layer: int) -> int:
    """FLOPs with which all heads of a token attend to one key and its value in a layer."""
    latent = shape.variant.latent
    if latent is not None:
        return 2 * shape.num_heads * (latent.row_size + latent.rank)
    return 4 * shape.num_heads * shape.sizes_of(layer).head_dim


def _pairs(num_tokens: int, window: Window | None) -> int:
    """The number of positions that each of `num_tokens` tokens sees, summed over them."""
    ramp = num_tokens if window is None else min(num_tokens, window_size(window))
    pairs = ramp * (ramp + 1) // 2
    if isinstance(window, Chunks):
        full, rest = divmod(num_tokens, max(ramp, 1))
        return full * pairs + rest * (rest + 1) // 2
    return pairs + (num_tokens - ramp) * ramp

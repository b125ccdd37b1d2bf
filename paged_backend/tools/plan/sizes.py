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
from paged_backend.values.kv_cache_groups import KVCacheGroup


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts of a checkpoint, by their use."""

    embedding: int  # looked up; also the output layer if the two are tied
    linear: int  # weights of the linear layers in all decoder layers
    head: int  # weights of a separate output layer; 0 if it is tied
    rest: int  # norms, biases and routers
    experts: int = 0  # weights of the experts in all decoder layers, of which a token uses some

    @property
    def total(self) -> int:
        """The total number of parameters."""
        return self.embedding + self.linear + self.experts + self.head + self.rest

    def bytes(self, weights: WeightType) -> int:
        """The bytes of the whole checkpoint in memory."""
        # A GPU dequantizes experts.
        rest_bits = (self.embedding + self.rest + self.experts) * weights.rest_bits
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
        unread = self.embedding if self.head else 0
        unread_bits = unread * weights.rest_bits
        unread_bits += round(self.experts * (1 - share_of_experts) * weights.rest_bits)
        return self.bytes(weights) - unread_bits // 8


def count_parameters(shape: ModelShape) -> Parameters:
    """Count the parameters of a checkpoint of this shape."""
    count: Counter[Role] = Counter()
    for spec in tensors_of(shape).values():
        count[spec.role] += spec.num_elements
    roles = Role.EMBEDDING, Role.LINEAR, Role.HEAD, Role.EXPERT
    embedding, linear, head, experts = (count.pop(role, 0) for role in roles)
    return Parameters(embedding, linear, head, count.total(), experts)


def share_of_experts(shape: ModelShape, num_tokens: float) -> float:
    """The share of the experts that a step of some tokens reads."""
    return 1.0 if shape.moe is None else shape.moe.share_of_experts(num_tokens)


@dataclass(frozen=True, slots=True)
class KvSizes:
    """Bytes of keys and values on each of the GPUs that share the heads."""

    layer_bytes: int  # per token and layer
    windows: tuple[int | None, ...]  # sliding window of each layer; None: no limit

    @classmethod
    def of(cls, shape: ModelShape, kv: KvType, num_gpus: int = 1) -> KvSizes:
        """Compute the sizes; with more GPUs than KV heads, several GPUs hold the same head."""
        kept = shape.kept
        kept = kept._replace(num_heads=max(1, kept.num_heads // num_gpus))
        layer_bytes = (kept.numbers * kv.bits + kept.vectors * kv.scale_bits) // 8
        return cls(layer_bytes, shape.attention_windows)

    @property
    def bytes_per_token(self) -> int:
        """The bytes per token in all layers together."""
        return self.layer_bytes * len(self.windows)

    def block_bytes(self, groups: Sequence[KVCacheGroup], block_size: int) -> int:
        """The bytes of a block of `block_size` tokens, in one layer of each place of a group."""
        return self.layer_bytes * max(len(group.layers) for group in groups) * block_size

    def bytes_seen(self, num_tokens: float) -> float:
        """The bytes that the last of `num_tokens` tokens attends to in each layer's window."""
        return self.layer_bytes * _seen(self.windows, num_tokens)


def state_bytes(
    shape: ModelShape, weights: WeightType, num_gpus: int = 1, stage: Stage | None = None
) -> int:
    """The bytes of the state of a sequence, which some layers keep in place of keys and values.

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
    return _flops_of_key(shape) * _seen(shape.attention_windows, num_tokens)


def prompt_attention_flops(shape: ModelShape, num_tokens: int) -> float:
    """Attention FLOPs for a whole prompt; each token attends to itself and those before it."""
    pairs = sum(_pairs(num_tokens, window or num_tokens) for window in shape.attention_windows)
    return _flops_of_key(shape) * pairs


def _flops_of_key(shape: ModelShape) -> int:
    """FLOPs with which all heads of a token attend to one key and its value."""
    latent = shape.variant.latent
    if latent is not None:
        return 2 * shape.num_heads * (latent.row_size + latent.rank)
    return 4 * shape.num_heads * shape.head_dim


def _seen(windows: tuple[int | None, ...], num_tokens: float) -> float:
    return sum(min(num_tokens, window or num_tokens) for window in windows)


def _pairs(num_tokens: int, window: int) -> int:
    """Sum of min(i, window) for i = 1 ... num_tokens."""
    ramp = min(num_tokens, window)
    return ramp * (ramp + 1) // 2 + (num_tokens - ramp) * window

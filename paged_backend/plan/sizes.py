"""Parameters, bytes and operations that follow from a decoder's shape."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from paged_backend.checkpoint.registry import tensors_of
from paged_backend.checkpoint.shape import ModelShape
from paged_backend.checkpoint.tensors import Role
from paged_backend.plan.number_types import KvType, WeightType


@dataclass(frozen=True, slots=True)
class Parameters:
    """How many numbers a checkpoint holds, by what is done with them."""

    embedding: int  # looked up; also the output layer where the two are tied
    linear: int  # weights of all layers' linear layers
    head: int  # of an output layer of its own
    rest: int  # norms and biases

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.linear + self.head + self.rest

    def bytes(self, weights: WeightType) -> int:
        """Of a whole checkpoint in memory."""
        rest = self.embedding + self.head + self.rest
        return round((self.linear * weights.bits + rest * weights.rest_bits) / 8)

    def bytes_of_step(self, weights: WeightType) -> int:
        """That every step reads: an embedding of its own is looked up in a few rows only."""
        unread = self.embedding if self.head else 0
        return self.bytes(weights) - unread * weights.rest_bits // 8


def count_parameters(shape: ModelShape) -> Parameters:
    """Count the parameters of a checkpoint of this shape."""
    count: Counter[Role] = Counter()
    for spec in tensors_of(shape).values():
        count[spec.role] += spec.num_elements
    return Parameters(
        embedding=count[Role.EMBEDDING],
        linear=count[Role.LINEAR],
        head=count[Role.HEAD],
        rest=count[Role.NORM] + count[Role.BIAS],
    )


@dataclass(frozen=True, slots=True)
class KvSizes:
    """Bytes of keys and values, on one GPU of those that share the heads."""

    layer_bytes: int  # of a token in one layer
    windows: tuple[int | None, ...]  # of each layer

    @classmethod
    def of(cls, shape: ModelShape, kv: KvType, num_gpus: int = 1) -> KvSizes:
        """With more GPUs than heads, several hold the same head."""
        heads = max(1, shape.num_kv_heads // num_gpus)
        head_bits = shape.head_dim * kv.bits + kv.scale_bits
        return cls(2 * heads * head_bits // 8, shape.windows)

    @property
    def bytes_per_token(self) -> int:
        """In all layers together."""
        return self.layer_bytes * len(self.windows)

    def bytes_seen(self, num_tokens: float) -> float:
        """That the last of so many tokens attends to: a layer looks no further than its window."""
        return self.layer_bytes * _seen(self.windows, num_tokens)


def attention_flops(shape: ModelShape, num_tokens: float) -> float:
    """Multiplications and additions for the last of so many tokens, all layers and heads."""
    return 4 * shape.num_heads * shape.head_dim * _seen(shape.windows, num_tokens)


def prompt_attention_flops(shape: ModelShape, num_tokens: int) -> float:
    """The same for all tokens of a prompt, each of which attends to itself and those before."""
    pairs = sum(_pairs(num_tokens, window or num_tokens) for window in shape.windows)
    return 4 * shape.num_heads * shape.head_dim * pairs


def _seen(windows: tuple[int | None, ...], num_tokens: float) -> float:
    return sum(min(num_tokens, window or num_tokens) for window in windows)


def _pairs(num_tokens: int, window: int) -> int:
    """Sum of min(i, window) for i = 1 ... num_tokens."""
    ramp = min(num_tokens, window)
    return ramp * (ramp + 1) // 2 + (num_tokens - ramp) * window

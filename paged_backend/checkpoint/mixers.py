"""Layers that keep a state for each sequence in place of attention, as values; no tensors here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from paged_backend.checkpoint.mamba import Mamba1Shape, Mamba2Shape
from paged_backend.checkpoint.tensors import (
    Role,
    TensorSpec,
    convolution_tensor,
    decay_tensor,
    linear_tensors,
)


class DeltaLayout(Enum):
    """The weights of linear attention as a checkpoint stores them."""

    FUSED = "fused"  # in_proj_qkvz and in_proj_ba, with the heads that share a key together
    SECTIONS = "sections"  # in_proj_qkv, in_proj_z, in_proj_b and in_proj_a
    SEPARATE = "separate"  # a projection of each kind, and a convolution of queries, keys, values


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Linear attention by the gated delta rule, after a short convolution (Qwen3-Next).

    Attributes:
        hidden_size: size of a row.
        num_key_heads: heads of queries and keys.
        num_value_heads: heads of values, a multiple of `num_key_heads`.
        key_dim: size of a head of queries and keys.
        value_dim: size of a head of values.
        width: rows that the convolution sees, its own included.
        layout: how the checkpoint stores the weights.
        max_beta: the largest part of a value that a row replaces. With 2, the state of a key can
            change its sign.
        norm_eps: epsilon of the norm of a head; None for that of the model.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    layout: DeltaLayout
    max_beta: float = 1.0
    norm_eps: float | None = None

    name = "linear_attn"

    @property
    def keys_size(self) -> int:
        """The size of all keys of a token."""
        return self.num_key_heads * self.key_dim

    @property
    def values_size(self) -> int:
        """The size of all values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The numbers of a token that are convolved: queries, keys and values."""
        return 2 * self.keys_size + self.values_size

    @property
    def kept_numbers(self) -> tuple[int, int]:
        """The numbers of a state in the model's dtype, and those in float32."""
        return self.channels * (self.width - 1), self.keys_size * self._values_per_key

    @property
    def _values_per_key(self) -> int:
        return self.num_value_heads // self.num_key_heads * self.value_dim

    @property
    def large_parts(self) -> dict[str, int]:
        """The sizes of queries, keys, values and gates, by names in the checkpoint."""
        match self.layout:
            case DeltaLayout.FUSED:
                return {"in_proj_qkvz": self.channels + self.values_size}
            case DeltaLayout.SECTIONS:
                return {"in_proj_qkv": self.channels, "in_proj_z": self.values_size}
        keys, values = self.keys_size, self.values_size
        return {"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values}

    @property
    def small_parts(self) -> dict[str, int]:
        """The sizes of the numbers for beta and decay, by names in the checkpoint."""
        heads = self.num_value_heads
        match self.layout:
            case DeltaLayout.FUSED:
                return {"in_proj_ba": 2 * heads}
            case DeltaLayout.SECTIONS:
                return {"in_proj_b": heads, "in_proj_a": heads}
        return {"b_proj": heads, "a_proj": heads}

    @property
    def convolutions(self) -> dict[str, int]:
        """The channels of each convolution, by its name in the checkpoint."""
        if self.layout is not DeltaLayout.SEPARATE:
            return {"conv1d": self.channels}
        keys = self.keys_size
        return {"q_conv1d": keys, "k_conv1d": keys, "v_conv1d": self.values_size}

    @property
    def output(self) -> str:
        """The checkpoint's name of the last linear layer."""
        return "o_proj" if self.layout is DeltaLayout.SEPARATE else "out_proj"

    @property
    def norm(self) -> str:
        """The checkpoint's name of the norm of a head."""
        return "o_norm" if self.layout is DeltaLayout.SEPARATE else "norm"

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the module, by name in it."""
        convolved = self.keys_size, self.keys_size, self.values_size
        for name, size in self.large_parts.items():
            sections = convolved if name == "in_proj_qkv" else ()
            yield from linear_tensors(name, self.hidden_size, size, False, 0, sections)
        for name, size in self.small_parts.items():
            yield f"{name}.weight", TensorSpec((size, self.hidden_size), Role.ROUTER, shard=0)
        yield from linear_tensors(self.output, self.values_size, self.hidden_size, False, 1)
        for name, size in self.convolutions.items():
            sections = convolved if name == "conv1d" else ()
            yield f"{name}.weight", convolution_tensor(size, self.width, sections)
        yield "A_log", decay_tensor(self.num_value_heads)
        yield "dt_bias", decay_tensor(self.num_value_heads)
        yield f"{self.norm}.weight", TensorSpec((self.value_dim,), Role.NORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaShape:
    """Linear attention by the gated delta rule with a decay for each channel (Kimi Linear).

    Attributes:
        hidden_size: size of a row.
        num_heads: heads of queries, keys and values.
        head_dim: size of a head, and of the rows that decays and gates are made of.
        width: rows that the convolutions see, their own included.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    width: int

    name = "self_attn"

    @property
    def values_size(self) -> int:
        """The size of all queries, keys, or values of a token."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """The numbers of a token that are convolved: queries, keys and values."""
        return 3 * self.values_size

    @property
    def kept_numbers(self) -> tuple[int, int]:
        """The numbers of a state in the model's dtype, and those in float32."""
        return self.channels * (self.width - 1), self.values_size * self.head_dim

    @property
    def small_parts(self) -> dict[str, int]:
        """The sizes of the numbers for beta, and of the rows for decays and gates, by name."""
        return {"b_proj": self.num_heads, "f_a_proj": self.head_dim, "g_a_proj": self.head_dim}

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the module, by name in it."""
        hidden, values, size = self.hidden_size, self.values_size, self.head_dim
        for name in ("q", "k", "v"):
            yield from linear_tensors(f"{name}_proj", hidden, values, False, 0)
            yield f"{name}_conv1d.weight", convolution_tensor(values, self.width)
        for name, outputs in self.small_parts.items():
            # Decays and gates of all heads are made of the same rows.
            shard = 0 if name == "b_proj" else None
            yield f"{name}.weight", TensorSpec((outputs, hidden), Role.ROUTER, shard)
        for name in ("f_b_proj", "g_b_proj"):
            yield f"{name}.weight", TensorSpec((values, size), Role.ROUTER, 0)
        yield "A_log", TensorSpec((1, 1, self.num_heads, 1), Role.DECAY, 2)
        yield "dt_bias", decay_tensor(values)
        yield "o_norm.weight", TensorSpec((size,), Role.NORM)
        yield from linear_tensors("o_proj", values, hidden, False, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LightningShape:
    """Linear attention with a fixed decay for each head, then a norm and a gate (MiniMax).

    Attributes:
        hidden_size: size of a row.
        num_heads: heads of queries, keys and values.
        head_dim: size of a head.
        num_layers: layers of the model; decays are slower in later ones.
        norm_eps: epsilon of the norm of all heads together.
    """

    hidden_size: int
    num_heads: int
    head_dim: int
    num_layers: int
    norm_eps: float = 1e-6

    name = "self_attn"

    @property
    def values_size(self) -> int:
        """The size of all values of a token."""
        return self.num_heads * self.head_dim

    @property
    def kept_numbers(self) -> tuple[int, int]:
        """The numbers of a state in the model's dtype, and those in float32."""
        return 0, self.values_size * self.head_dim

    def slopes(self, layer: int) -> list[float]:
        """Return the negative logarithm of each head's decay in a layer.

        They are those of ALiBi (Press et al., "Train Short, Test Long", 2021, section 3), less in
        later layers (MiniMax, "MiniMax-01: Scaling Foundation Models with Lightning Attention",
        2025).
        """
        factor = 1 - layer / (self.num_layers - 1 + 1e-5) + 1e-5
        heads = range(1, self.num_heads + 1)
        return [factor * 2 ** (-8 * head / self.num_heads) for head in heads]

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the module, by name in it."""
        hidden, values = self.hidden_size, self.values_size
        yield from linear_tensors("qkv_proj", hidden, 3 * values, False, 0)
        yield from linear_tensors("output_gate", hidden, values, False, 0)
        yield from linear_tensors("out_proj", values, hidden, False, 1)
        yield "norm.weight", TensorSpec((values,), Role.NORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvShape:
    """A short convolution between two gates (LFM2).

    Attributes:
        hidden_size: size of a row.
        width: rows that the convolution sees, its own included.
        bias: whether the convolution and the linear layers have biases.
        num_ranks: the number of ranks that divide the channels.
    """

    hidden_size: int
    width: int
    bias: bool
    num_ranks: int = 1

    name = "conv"

    @property
    def kept_numbers(self) -> tuple[int, int]:
        """The numbers of a state in the model's dtype, and those in float32."""
        return self.values_size * (self.width - 1), 0

    @property
    def values_size(self) -> int:
        """The channels, which the last linear layer reads."""
        return self.hidden_size // self.num_ranks

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the module, by name in it."""
        hidden, values = self.hidden_size, self.values_size
        yield from linear_tensors("in_proj", hidden, 3 * values, self.bias, 0, (values,) * 3)
        yield from linear_tensors("out_proj", values, hidden, self.bias, 1)
        yield "conv.weight", convolution_tensor(values, self.width)
        if self.bias:
            yield "conv.bias", TensorSpec((values,), Role.BIAS, shard=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RgLruShape:
    """A gated linear recurrent unit after a short convolution, times a gate (Griffin).

    Attributes:
        hidden_size: size of a row.
        values_size: numbers of a state.
        num_blocks: blocks of these numbers, each with products that compute its gates.
        width: rows that the convolution sees, its own included.
    """

    hidden_size: int
    values_size: int
    num_blocks: int
    width: int

    name = "temporal_block"

    @property
    def kept_numbers(self) -> tuple[int, int]:
        """The numbers of a state in the model's dtype, and those in float32."""
        return self.values_size * (self.width - 1), self.values_size

    @property
    def block_size(self) -> int:
        """The numbers of a block."""
        return self.values_size // self.num_blocks

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the module, by name in it."""
        hidden, values, size = self.hidden_size, self.values_size, self.block_size
        for name in ("linear_y", "linear_x"):
            yield from linear_tensors(name, hidden, values, True, 0)
        yield from linear_tensors("linear_out", values, hidden, True, 1)
        yield "conv_1d.weight", convolution_tensor(values, self.width)
        yield "conv_1d.bias", TensorSpec((values,), Role.BIAS, shard=0)
        yield "rg_lru.recurrent_param", decay_tensor(values)
        for name in ("input_gate", "recurrent_gate"):
            weight = TensorSpec((self.num_blocks, size, size), Role.ROUTER, shard=0)
            yield f"rg_lru.{name}_weight", weight
            yield f"rg_lru.{name}_bias", TensorSpec((self.num_blocks, size), Role.BIAS, shard=0)


StateMixer = (
    DeltaShape
    | KimiDeltaShape
    | LightningShape
    | Mamba1Shape
    | Mamba2Shape
    | RgLruShape
    | ShortConvShape
)
"""What a layer has in place of attention."""

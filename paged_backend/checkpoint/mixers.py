"""Layers that keep a state for each sequence in place of attention, as values; no tensors here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_backend.checkpoint.tensors import Role, TensorSpec, linear_tensors


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
        fused: the checkpoint stores queries, keys, values and gates as ``in_proj_qkvz``, and the
            other numbers as ``in_proj_ba``, with the heads that share a key together.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    width: int
    fused: bool

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
    def large_parts(self) -> dict[str, int]:
        """The sizes of queries, keys, values and gates, by names in the checkpoint."""
        if self.fused:
            return {"in_proj_qkvz": self.channels + self.values_size}
        return {"in_proj_qkv": self.channels, "in_proj_z": self.values_size}

    @property
    def small_parts(self) -> dict[str, int]:
        """The sizes of the numbers for beta and decay, by names in the checkpoint."""
        if self.fused:
            return {"in_proj_ba": 2 * self.num_value_heads}
        return {"in_proj_b": self.num_value_heads, "in_proj_a": self.num_value_heads}

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the module, by name in it."""
        for name, size in self.large_parts.items():
            yield from linear_tensors(name, self.hidden_size, size, False, 0)
        for name, size in self.small_parts.items():
            yield f"{name}.weight", TensorSpec((size, self.hidden_size), Role.ROUTER)
        yield from linear_tensors("out_proj", self.values_size, self.hidden_size, False, 1)
        yield "conv1d.weight", TensorSpec((self.channels, 1, self.width), Role.CONVOLUTION)
        yield "A_log", TensorSpec((self.num_value_heads,), Role.DECAY)
        yield "dt_bias", TensorSpec((self.num_value_heads,), Role.DECAY)
        yield "norm.weight", TensorSpec((self.value_dim,), Role.NORM)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvShape:
    """A short convolution between two gates (LFM2).

    Attributes:
        hidden_size: size of a row.
        width: rows that the convolution sees, its own included.
        bias: whether the convolution and the linear layers have biases.
    """

    hidden_size: int
    width: int
    bias: bool

    name = "conv"

    def tensors(self) -> Iterator[tuple[str, TensorSpec]]:
        """Yield the tensors of the module, by name in it."""
        hidden = self.hidden_size
        yield from linear_tensors("in_proj", hidden, 3 * hidden, self.bias, 0)
        yield from linear_tensors("out_proj", hidden, hidden, self.bias, 1)
        yield "conv.weight", TensorSpec((hidden, 1, self.width), Role.CONVOLUTION)
        if self.bias:
            yield "conv.bias", TensorSpec((hidden,), Role.BIAS)


StateMixer = DeltaShape | ShortConvShape
"""What a layer has in place of attention."""

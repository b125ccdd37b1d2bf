"""A convolution alone, which keeps the last rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_backend.checkpoint.mixers.parts import convolution
from paged_backend.checkpoint.tensors import Role, TensorSpec, linear_tensors


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
        yield "conv.weight", convolution(values, self.width)
        if self.bias:
            yield "conv.bias", TensorSpec((values,), Role.BIAS, shard=0)

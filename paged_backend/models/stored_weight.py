"""The weight of a linear layer in the form in which a checkpoint stores it.

A rank that has a share of a weight reads the stored tensors as a whole and divides the numbers that
they stand for. So each format can be divided, wherever its groups and its words end.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from paged_backend.checkpoint.stored_tensor import Parameter, StoredTensor, StoredType
from paged_backend.models.division import Division
from paged_backend.quantization.formats import FormatError, WeightFormat
from paged_backend.quantization.forms import Encoding
from paged_backend.quantization.weight import QuantizedWeight, divided_block
from paged_backend.values.errors import ConfigError


class StoredWeight:
    """The places of the stored tensors of one weight, and of its bias.

    Args:
        name: the layer's name in the checkpoint.
        weight_format: how the weight is stored; None if it is not quantized.
        outputs: number of the rows that this rank has.
        inputs: number of the columns that it has.
        bias: whether the layer has a bias.
        division: the ranks among which the weight is divided; None for one rank.
    """

    def __init__(
        self,
        name: str,
        weight_format: WeightFormat | None,
        outputs: int,
        inputs: int,
        *,
        bias: bool,
        division: Division | None = None,
    ) -> None:
        self._name = name
        self._format = weight_format
        shares = {} if division is None else division.shares
        self._share, self._bias_share = shares.get(f"{name}.weight"), shares.get(f"{name}.bias")
        if self._share is not None:
            outputs, inputs = self._share.whole
        self._sizes = outputs, inputs
        kinds = {"weight": StoredType(self._sizes)}
        if weight_format is not None:
            kinds = weight_format.tensors(*self._sizes)
        # Some writers of GPTQ store biases of zero for layers that have none.
        kinds["bias"] = StoredType((outputs,), optional=not bias)
        self._has_bias = bias
        self._stored = {suffix: StoredTensor(kind) for suffix, kind in kinds.items()}

    def parameters(self) -> dict[str, Parameter]:
        """Return the places of the stored tensors, by suffix."""
        return {**self._stored}

    def dense(self) -> Tensor:
        """Return the weight [outputs, inputs] as floats.

        Raises:
            ConfigError: a stored tensor holds values that are wrong.
        """
        if self._format is not None:
            return self.read().dequantize()
        weight = self._stored["weight"].value
        return weight if self._share is None else self._share.take(weight)

    def bias(self) -> Tensor | None:
        """Return the bias; None for a layer that has none.

        Raises:
            ConfigError: the checkpoint has one that is not zero for such a layer.
        """
        bias = self._stored["bias"]
        if self._has_bias:
            share = self._bias_share
            return bias.value if share is None else share.take(bias.value)
        if bias.filled and bool(bias.value.any()):
            raise ConfigError(f"{bias.origin} has no place in this architecture, and is not zero")
        return None

    def read(self) -> QuantizedWeight:
        """Return the weight, which must be quantized.

        Raises:
            ConfigError: a stored tensor holds values that are wrong.
        """
        assert self._format is not None
        tensors = {suffix: place.value for suffix, place in self._stored.items() if place.filled}
        for suffix in tensors:
            if "scale" in suffix:
                self._stored[suffix].check_scale()
        try:
            weight = self._format.read(tensors, *self._sizes)
        except FormatError as error:
            raise ConfigError(f"the checkpoint's tensor {self._name}.{error}") from error
        return weight if self._share is None else weight.take(self._share)

    @property
    def encoding(self) -> Encoding:
        """The kind of numbers of the weight, which must be quantized, and its blocks."""
        assert self._format is not None
        encoding = self._format.encoding
        if self._share is None:
            return encoding
        return replace(encoding, block=divided_block(encoding.block, self._share))

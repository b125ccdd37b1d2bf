"""Tensors that a model takes from a checkpoint in the form in which they are stored there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.values.errors import ConfigError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class StoredType:
    """The shape of a stored tensor, and the dtypes that it may have.

    Dimensions of size 1 do not count: a scale for each row may be [rows] or [rows, 1].

    Attributes:
        shape: shape of the tensor.
        dtypes: dtypes that it may have.
        optional: whether the checkpoint may lack it.
        one_for_all: whether a single number may stand for all elements.
    """

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    optional: bool = False
    one_for_all: bool = False


class StoredTensor:
    """The place of a tensor that is kept in its stored dtype until the model is packed."""

    def __init__(self, kind: StoredType) -> None:
        self.kind = kind
        self.origin = ""
        self._value: Tensor | None = None

    def fill(self, tensor: Tensor, origin: str) -> None:
        """Keep a tensor; `origin` names the tensor and its file in messages.

        Raises:
            ConfigError: the shape or the dtype does not fit.
        """
        if tensor.dtype not in self.kind.dtypes:
            allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in self.kind.dtypes)
            raise ConfigError(f"{origin} must be {allowed}, got {tensor.dtype}")
        if self.kind.one_for_all and tensor.numel() == 1:
            tensor = tensor.reshape(()).expand(self.kind.shape)
        if _without_ones(tensor.shape) != _without_ones(self.kind.shape):
            raise ConfigError(
                f"{origin} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(self.kind.shape)}"
            )
        self.origin = origin
        self._value = tensor.reshape(self.kind.shape)

    def check_scale(self) -> None:
        """Check the values of a scale.

        Raises:
            ConfigError: a value is not a finite number above zero.
        """
        scale = self.value.float()
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise ConfigError(f"{self.origin} must hold finite numbers above zero")

    @property
    def filled(self) -> bool:
        """Return whether the checkpoint holds the tensor."""
        return self._value is not None

    @property
    def value(self) -> Tensor:
        """The tensor, which must be filled."""
        assert self._value is not None
        return self._value


Parameter = Tensor | StoredTensor
"""Memory of the model that a tensor is copied to, or the place of a tensor that is kept."""


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]

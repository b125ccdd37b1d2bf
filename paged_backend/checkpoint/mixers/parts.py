"""Tensors that several kinds of layers with a state have."""

from __future__ import annotations

from paged_backend.checkpoint.tensors import Role, TensorSpec


def convolution(channels: int, width: int, sections: tuple[int, ...] = ()) -> TensorSpec:
    """Return the weight of a convolution of each channel, which ranks divide."""
    return TensorSpec((channels, 1, width), Role.CONVOLUTION, 0, sections)


def decay(*shape: int) -> TensorSpec:
    """Return numbers of decay, of which ranks divide the first dimension."""
    return TensorSpec(shape, Role.DECAY, shard=0)

"""The device properties that launches depend on, or those that stand for the interpreter."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from paged_kernels.errors import ArgumentError

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton interprets kernels on the CPU; Triton reads the variable on import."""


@dataclass(frozen=True, slots=True)
class Device:
    """Device properties that determine launch configurations."""

    arch: int  # compute capability, major * 10 + minor
    num_sms: int  # streaming multiprocessors


_INTERPRETER = Device(arch=90, num_sms=8)
_pretended: Device | None = None


def device_of(name: str, tensor: torch.Tensor) -> Device:
    """Return the device of `tensor`, the argument `name`.

    Raises:
        ArgumentError: no kernel can run on it.
    """
    if _pretended is not None:
        return _pretended
    if tensor.is_cuda:
        return _cuda(tensor.device.index)
    if INTERPRETED and tensor.device.type == "cpu":
        return _INTERPRETER
    raise ArgumentError(name, f"must be on an NVIDIA device, got {tensor.device}")


@contextmanager
def pretend(device: Device) -> Iterator[None]:
    """Choose launches as on another device, for compilation without execution."""
    global _pretended
    before, _pretended = _pretended, device
    try:
        yield
    finally:
        _pretended = before


@functools.cache
def _cuda(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    return Device(properties.major * 10 + properties.minor, properties.multi_processor_count)

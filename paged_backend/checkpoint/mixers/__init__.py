"""Layers that keep a state for each sequence in place of attention, as values; no tensors here.

A module has the shapes of one kind, and `parts` the tensors that several kinds have.
"""

from __future__ import annotations

from paged_backend.checkpoint.mixers.linear_attention import (
    DeltaLayout,
    DeltaShape,
    KimiDeltaShape,
    LightningShape,
)
from paged_backend.checkpoint.mixers.short_conv import ShortConvShape
from paged_backend.checkpoint.mixers.state_spaces import (
    Mamba1Norms,
    Mamba1Shape,
    Mamba2Shape,
    RgLruShape,
)

__all__ = [
    "DeltaLayout",
    "DeltaShape",
    "KimiDeltaShape",
    "LightningShape",
    "Mamba1Norms",
    "Mamba1Shape",
    "Mamba2Shape",
    "RgLruShape",
    "ShortConvShape",
    "StateMixer",
]

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

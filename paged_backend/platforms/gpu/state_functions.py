"""The functions of a GPU on states of sequences; see `models.states.StateFunctions`.

Prompts are computed row by row, so that no bit of a state depends on how they are cut.
"""

from __future__ import annotations

from paged_kernels.causal_conv import causal_conv
from paged_kernels.gated_delta import gated_delta
from paged_kernels.linear_attention import linear_attention
from paged_kernels.mamba1_scan import mamba1_scan
from paged_kernels.rg_lru import rg_lru
from paged_kernels.selective_scan import selective_scan

from paged_backend.platforms.portable.state_functions import delta_gates

__all__ = [
    "causal_conv",
    "delta_gates",
    "gated_delta",
    "linear_attention",
    "mamba1_scan",
    "rg_lru",
    "selective_scan",
]

"""The functions of a CPU on states of sequences; see `models.states.StateFunctions`."""

from paged_backend.platforms.cpu.causal_conv import causal_conv
from paged_backend.platforms.cpu.delta_gates import delta_gates
from paged_backend.platforms.cpu.gated_delta import gated_delta
from paged_backend.platforms.cpu.linear_attention import linear_attention
from paged_backend.platforms.cpu.mamba1_scan import mamba1_scan
from paged_backend.platforms.cpu.rg_lru import rg_lru
from paged_backend.platforms.cpu.selective_scan import selective_scan

__all__ = [
    "causal_conv",
    "delta_gates",
    "gated_delta",
    "linear_attention",
    "mamba1_scan",
    "rg_lru",
    "selective_scan",
]

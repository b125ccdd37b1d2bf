"""The functions of a CPU on states of sequences; see `models.states.StateFunctions`."""

from paged_backend.platforms.cpu.causal_conv import causal_conv
from paged_backend.platforms.cpu.gated_delta import gated_delta
from paged_backend.platforms.cpu.selective_scan import selective_scan

__all__ = ["causal_conv", "gated_delta", "selective_scan"]

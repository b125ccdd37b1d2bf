"""The functions of a CPU on states of sequences; see `models.states.StateFunctions`."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from paged_backend.platforms.cpu.causal_conv import causal_conv
from paged_backend.platforms.cpu.gated_delta import gated_delta
from paged_backend.platforms.cpu.mamba1_scan import mamba1_scan
from paged_backend.platforms.cpu.rg_lru import rg_lru
from paged_backend.platforms.cpu.selective_scan import selective_scan
from paged_backend.platforms.portable import state_functions

__all__ = ["causal_conv", "delta_gates", "gated_delta", "mamba1_scan", "rg_lru", "selective_scan"]

_VECTORS = 32  # numbers of the two vectors that a turn of torch's loops computes, at most


def delta_gates(numbers: Tensor, decay: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Compute decays and shares, see `StateFunctions.delta_gates`.

    Torch rounds the numbers after its loop's last turn in another way. Rows are therefore padded
    to whole turns, so that a result does not depend on the number of rows.
    """
    heads = len(decay)
    missing = (0, -heads % _VECTORS)
    padded = pad(numbers.view(len(numbers), 2, heads), missing).flatten(1)
    both = state_functions.delta_gates(padded, pad(decay, missing), pad(dt_bias, missing))
    return both[0][:, :heads], both[1][:, :heads]

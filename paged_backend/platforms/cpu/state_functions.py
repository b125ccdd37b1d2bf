"""The functions of a CPU on states of sequences; see `models.states.StateFunctions`."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from paged_backend.platforms.cpu.causal_conv import causal_conv
from paged_backend.platforms.cpu.gated_delta import gated_delta
from paged_backend.platforms.cpu.linear_attention import linear_attention
from paged_backend.platforms.cpu.mamba1_scan import mamba1_scan
from paged_backend.platforms.cpu.rg_lru import rg_lru
from paged_backend.platforms.cpu.selective_scan import selective_scan
from paged_backend.platforms.portable import state_functions

__all__ = [
    "causal_conv",
    "delta_gates",
    "gated_delta",
    "linear_attention",
    "mamba1_scan",
    "rg_lru",
    "selective_scan",
]

_VECTORS = 32  # numbers of the two vectors that a turn of torch's loops computes, at most


def delta_gates(
    shares: Tensor, rates: Tensor, decay: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute decays and shares, see `StateFunctions.delta_gates`.

    Torch rounds the numbers after its loop's last turn in another way. Rows are therefore padded
    to whole turns, so that a result does not depend on the number of rows.
    """
    padded = (_whole_turns(tensor) for tensor in (shares, rates, decay, dt_bias))
    decays, parts = state_functions.delta_gates(*padded)
    return decays[:, : rates.shape[1]], parts[:, : shares.shape[1]]


def _whole_turns(x: Tensor) -> Tensor:
    """Pad the last dimension of a tensor with zeros to whole turns of torch's loops."""
    return pad(x, (0, -x.shape[-1] % _VECTORS))

"""Compares the logits of two engines at each position."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Logits: TypeAlias = NDArray[np.float32]
"""[vocab]: the logits of one position."""


def log_probabilities(logits: Logits) -> NDArray[np.float64]:
    """Return the natural logarithms of the softmax, in float64, of one row of logits."""
    shifted = logits.astype(np.float64) - np.max(logits)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def kl_divergence(reference: Logits, tested: Logits) -> float:
    """Return D(reference || tested) over the whole vocabulary, in nats.

    It is NaN if a row of logits has a NaN.
    """
    p, q = log_probabilities(reference), log_probabilities(tested)
    # A token that the reference rules out adds nothing, whatever the other engine makes of it.
    possible = p != -np.inf
    p, q = p[possible], q[possible]
    total = float(np.sum(np.exp(p) * (p - q)))
    return 0.0 if total < 0 else total  # no divergence is negative; the sum's rounding can be


@dataclass(frozen=True, slots=True)
class DivergenceFigures:
    """What many positions say together; divergences are in nats."""

    num_positions: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    equal_argmax_share: float  # share of the positions


class Divergences:
    """Collects positions one at a time, and keeps one number of each."""

    def __init__(self) -> None:
        self._kl = array("d")
        self._num_equal = 0

    def add(self, reference: Logits, tested: Logits) -> float:
        """Add the logits of one position, and return their divergence."""
        kl = kl_divergence(reference, tested)
        self._kl.append(kl)
        self._num_equal += int(np.argmax(reference) == np.argmax(tested))
        return kl

    def figures(self) -> DivergenceFigures:
        """Return the figures of all positions so far, of which there must be one."""
        kl = np.array(self._kl)
        return DivergenceFigures(
            num_positions=len(kl),
            mean_kl=float(kl.mean()),
            p99_kl=float(np.percentile(kl, 99)),
            max_kl=float(kl.max()),
            equal_argmax_share=self._num_equal / len(kl),
        )

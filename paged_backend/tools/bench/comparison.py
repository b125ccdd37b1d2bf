"""Figures of an engine and its peer over rounds in turn, and their ratios."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Pair:
    """The figures of one round."""

    engine: float
    peer: float | None  # None: there is no peer, or it has failed


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measurement over all rounds.

    The ratio of a round is above 1 where the engine is faster, for times, too.
    """

    name: str
    label: str
    is_rate: bool
    rounds: list[Pair] = field(default_factory=list)

    @property
    def engine(self) -> float:
        """The engine's median."""
        return statistics.median(pair.engine for pair in self.rounds)

    @property
    def peer(self) -> float | None:
        """The peer's median; None if it has no figure."""
        figures = [pair.peer for pair in self.rounds if pair.peer is not None]
        return statistics.median(figures) if figures else None

    @property
    def ratios(self) -> list[float]:
        """The ratio of each round in which both were measured."""
        return [
            pair.engine / pair.peer if self.is_rate else pair.peer / pair.engine
            for pair in self.rounds
            if pair.peer is not None
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the values to save, rounds included."""
        ratios = self.ratios
        return {
            "name": self.name,
            "label": self.label,
            "engine": self.engine,
            "peer": self.peer,
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_min": min(ratios, default=None),
            "ratio_max": max(ratios, default=None),
            "rounds": [{"engine": pair.engine, "peer": pair.peer} for pair in self.rounds],
        }

    def cells(self) -> tuple[str, ...]:
        """Return the cells of the table's row."""
        if self.peer is None:
            return self.label, _shown(self.engine), "-", "-", "-"
        ratios = self.ratios
        return (
            self.label,
            _shown(self.engine),
            _shown(self.peer),
            f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}..{max(ratios):.2f}",
        )


def _shown(figure: float) -> str:
    return f"{figure:.1f}" if figure >= 100 else f"{figure:.3g}"

"""Distributions of prompt and response lengths, and their one-line text form."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from paged_backend.values.errors import option_error
from paged_backend.values.validation import shorten

MAX_LENGTH = 2**24
FORMS = (
    "a number, uniform:min=A,max=B, lognormal:median=M,min=A,max=B (and sigma=S where it is not "
    "0.7), or percentiles:50=A,90=B"
)

Array: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Uniform:
    """Uniform over the integers from ``min`` to ``max``, inclusive."""

    min: int
    max: int

    def __post_init__(self) -> None:
        _check_ascending(self.min, self.max)

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """Draw ``count`` lengths."""
        return rng.integers(self.min, self.max, size=count, endpoint=True, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal, clipped to a range: many short lengths and a few long ones."""

    median: int
    min: int
    max: int
    sigma: float = 0.7  # standard deviation of the logarithm

    def __post_init__(self) -> None:
        _check_ascending(self.min, self.median, self.max)
        if not 0 < self.sigma <= 10:
            raise ValueError("sigma")

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """Draw ``count`` lengths."""
        drawn = rng.lognormal(math.log(self.median), self.sigma, count)
        lengths: Array = np.clip(np.rint(drawn), self.min, self.max).astype(np.int64)
        return lengths


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Given percentiles with linear interpolation between them; clamped outside them."""

    percents: tuple[float, ...]
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        _check_ascending(*self.lengths)
        steps = zip(self.percents, self.percents[1:], strict=False)
        if not all(0 <= percent <= 100 for percent in self.percents):
            raise ValueError("percents")
        if not all(before < after for before, after in steps):
            raise ValueError("percents")

    def draw(self, rng: np.random.Generator, count: int) -> Array:
        """Draw ``count`` lengths."""
        drawn = np.interp(rng.uniform(0, 100, count), self.percents, self.lengths)
        return np.rint(drawn).astype(np.int64)


Lengths: TypeAlias = Uniform | LogNormal | Percentiles


def parse_lengths(name: str, text: str) -> Lengths:
    """Parse one of `FORMS`.

    Raises:
        ConfigError: the text of option ``name`` has none of these forms.
    """
    try:
        return _parse(text)
    except (ValueError, TypeError, OverflowError):
        raise option_error(
            name, f"must be {FORMS}, with lengths that ascend from 1, got {shorten(text)}"
        ) from None


def _parse(text: str) -> Lengths:
    form, colon, rest = text.partition(":")
    if not colon:
        return Uniform(int(text), int(text))
    pairs = [item.partition("=")[::2] for item in rest.split(",")]
    if form == "percentiles":
        percents, lengths = zip(*pairs, strict=True)
        return Percentiles(tuple(map(float, percents)), tuple(map(int, lengths)))
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name twice")
    sigma = (
        {"sigma": float(values.pop("sigma"))} if form == "lognormal" and "sigma" in values else {}
    )
    whole = {name: int(value) for name, value in values.items()}
    kind = {"uniform": Uniform, "lognormal": LogNormal}.get(form)
    if kind is None:
        raise ValueError("form")
    made: Lengths = kind(**whole, **sigma)
    return made


def _check_ascending(*lengths: int) -> None:
    if not all(1 <= length <= MAX_LENGTH for length in lengths) or list(lengths) != sorted(lengths):
        raise ValueError("lengths")

"""Rotary position embedding: the frequencies a checkpoint asks for, and the table made of them.

The frequencies are computed in float32, as in training: at a position in the thousands a
difference in a frequency's last bit turns an angle by more than rounding does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.checkpoint.context_length import LONG_ROPES, ORIGINAL, PROPORTIONAL, rope_type
from paged_backend.checkpoint.limits import MAX_POSITIONS
from paged_backend.values.validation import shorten

DEFAULT_THETA = 10000.0
_MAX_DIVISOR = 1e9


@dataclass(frozen=True, slots=True)
class Rope:
    """Pair `i` of a head turns by `position * frequencies[i]` radians.

    Attributes:
        head_dim: size of a head; its pairs beyond the frequencies do not turn.
        frequencies: at most [head_dim / 2], float32 values.
        scale: factor on the cosines and sines of pairs that turn.
        long_frequencies: the frequencies of models for more positions than `short_positions`.
        short_positions: see `long_frequencies`.
    """

    head_dim: int
    frequencies: tuple[float, ...] = ()
    scale: float = 1.0
    long_frequencies: tuple[float, ...] = ()
    short_positions: int = 0

    @property
    def dim(self) -> int:
        """The number of a head's dimensions that turn."""
        return 2 * len(self.frequencies)

    def table(self, num_positions: int, device: torch.device) -> Tensor:
        """[num_positions, head_dim] float32: each position's cosines, then its sines."""
        is_long = self.long_frequencies and num_positions > self.short_positions
        frequencies = self.long_frequencies if is_long else self.frequencies
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, torch.tensor(frequencies, device=device))
        still = torch.zeros(num_positions, (self.head_dim - self.dim) // 2, device=device)
        turning = angles.cos() * self.scale, angles.sin() * self.scale
        return torch.cat((turning[0], still.cos(), turning[1], still), dim=1)


def read_rope(
    section: ConfigFile | None, head_dim: int, dim: int | None, max_positions: int
) -> Rope:
    """Read a rotary embedding.

    Args:
        section: its keys; None for a layer without one.
        head_dim: size of a head.
        dim: the number of a head's dimensions that turn; None for all.
        max_positions: ``max_position_embeddings`` of the model.

    Raises:
        ConfigError: the scaling is not supported or lacks a key.
    """
    if section is None:
        return Rope(head_dim)
    kind = rope_type(section)
    takes_part = dim is not None or kind == PROPORTIONAL
    if not takes_part and section.value("partial_rotary_factor") not in (None, 1):
        raise section.error("partial_rotary_factor", "is not supported unless it is 1")
    dim = dim or head_dim
    if kind not in (*_SCALINGS, *LONG_ROPES):
        known = ", ".join((*_SCALINGS, *LONG_ROPES))
        raise section.error("rope_type", f"must be one of {known}, got {shorten(kind)}")
    theta = section.number("rope_theta", DEFAULT_THETA)
    unscaled = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    if kind in LONG_ROPES:
        return _long_rope(section, head_dim, unscaled, max_positions)
    frequencies, scale = _SCALINGS[kind](section, unscaled, theta, max_positions)
    return Rope(head_dim, tuple(frequencies.tolist()), scale)


def _default(
    scaling: ConfigFile, unscaled: Tensor, theta: float, max_positions: int
) -> tuple[Tensor, float]:
    return unscaled, 1.0


def _dynamic(
    scaling: ConfigFile, unscaled: Tensor, theta: float, max_positions: int
) -> tuple[Tensor, float]:
    """Dynamic NTK: the frequencies of sequences within the trained length, the only ones served.

    Those of longer sequences depend on the length, so all keys in the cache would have to change.
    """
    scaling.number("factor")
    return unscaled, 1.0


def _linear(
    scaling: ConfigFile, unscaled: Tensor, theta: float, max_positions: int
) -> tuple[Tensor, float]:
    """Position interpolation: all frequencies are lowered alike."""
    return unscaled / scaling.number("factor"), 1.0


def _llama3(
    scaling: ConfigFile, unscaled: Tensor, theta: float, max_positions: int
) -> tuple[Tensor, float]:
    """Llama 3.1: low frequencies are lowered, high ones kept, those between are blended."""
    trained = _trained(scaling, max_positions)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"must be above low_freq_factor ({low:g})")
    turns = trained * unscaled / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * unscaled / scaling.number("factor") + kept * unscaled, 1.0


def _yarn(
    scaling: ConfigFile, unscaled: Tensor, theta: float, max_positions: int
) -> tuple[Tensor, float]:
    """YaRN: as llama3, but blended by a ramp over the pairs' indices, and scores are sharpened."""
    trained = _trained(scaling, max_positions)
    factor = scaling.number("factor", max_positions / trained)
    num_pairs = len(unscaled)
    if theta <= 1:
        raise scaling.error("rope_theta", f"must be above 1, got {theta:g}")

    def pair_with(turns: float) -> float:
        """Index of the pair that makes so many turns within the trained length."""
        return num_pairs * math.log(trained / (turns * 2 * math.pi)) / math.log(theta)

    first = pair_with(scaling.number("beta_fast", 32))
    last = pair_with(scaling.number("beta_slow", 1))
    if scaling.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_pairs - 1)
    ramp = (torch.arange(num_pairs, dtype=torch.float32) - first) / max(last - first, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return unscaled / factor * (1 - kept) + unscaled * kept, _yarn_scale(scaling, factor)


def _yarn_scale(scaling: ConfigFile, factor: float) -> float:
    def sharpened(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if scaling.value("attention_factor") is not None:
        return scaling.number("attention_factor")
    if scaling.value("mscale") and scaling.value("mscale_all_dim"):
        all_dim = sharpened(scaling.number("mscale_all_dim"))
        return sharpened(scaling.number("mscale")) / all_dim
    return sharpened(1)


def _long_rope(section: ConfigFile, head_dim: int, unscaled: Tensor, max_positions: int) -> Rope:
    """LongRoPE: a divisor for each frequency, others for models that serve long texts.

    The choice depends on the length that a model serves, not on a sequence's length: its keys in
    the cache would have to change when it grows. vLLM chooses the same way.

    Ding et al., "LongRoPE" (2024).
    """
    short_positions = _trained(section, max_positions)
    factor = section.number("factor", max_positions / short_positions)
    scale = section.optional_number("attention_factor")
    if scale is None:
        growth = math.log(factor) / math.log(short_positions) if factor > 1 else 0.0
        scale = math.sqrt(1 + growth)
    short, long = (
        tuple((unscaled / _divisors(section, key, len(unscaled))).tolist())
        for key in ("short_factor", "long_factor")
    )
    return Rope(head_dim, short, scale, long, short_positions)


def _trained(section: ConfigFile, max_positions: int) -> int:
    """Read the number of positions before the scaling."""
    return section.integer(ORIGINAL, max_positions, high=MAX_POSITIONS)


def _proportional(
    scaling: ConfigFile, unscaled: Tensor, theta: float, max_positions: int
) -> tuple[Tensor, float]:
    """Gemma 4: the pairs are those of the whole head, of which only a part turns."""
    part = scaling.number("partial_rotary_factor", 1.0)
    turning = int(part * 2 * len(unscaled) // 2)
    if not 1 <= turning <= len(unscaled):
        raise scaling.error(
            "partial_rotary_factor", f"must give 1 to {len(unscaled)} pairs, got {turning}"
        )
    frequencies = unscaled / scaling.number("factor", 1.0)
    frequencies[turning:] = 0.0
    return frequencies, 1.0


def _divided(
    scaling: ConfigFile, unscaled: Tensor, theta: float, max_positions: int
) -> tuple[Tensor, float]:
    """GGUF: any scaling of single frequencies, such as llama3, as one divisor for each."""
    return unscaled / _divisors(scaling, "divisors", len(unscaled)), 1.0


def _divisors(section: ConfigFile, key: str, count: int) -> Tensor:
    values = section.value(key)
    is_list = isinstance(values, list) and len(values) == count
    if not is_list or not all(
        type(value) in (int, float) and 0 < value <= _MAX_DIVISOR for value in values
    ):
        raise section.error(
            key, f"must be a list of {count} numbers above zero, at most {_MAX_DIVISOR:g}"
        )
    return torch.tensor(values, dtype=torch.float32)


_SCALINGS: dict[str, Callable[[ConfigFile, Tensor, float, int], tuple[Tensor, float]]] = {
    "default": _default,
    "dynamic": _dynamic,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    PROPORTIONAL: _proportional,
    "divided": _divided,
}

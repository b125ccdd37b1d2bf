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

DEFAULT_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class Rope:
    """Pair `i` of a head turns by `position * frequencies[i]` radians."""

    frequencies: tuple[float, ...]  # [head_dim / 2], float32 values
    scale: float = 1.0  # factor on the cosines and sines

    def table(self, num_positions: int, device: torch.device) -> Tensor:
        """[num_positions, head_dim] float32: each position's cosines, then its sines."""
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, torch.tensor(self.frequencies, device=device))
        return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(self.scale)


def read_rope(config: ConfigFile, head_dim: int, max_positions: int) -> Rope:
    """Read the rotary embedding from either form that transformers writes.

    Version 5 writes `rope_parameters`; older files have `rope_theta` beside `rope_scaling`.

    Raises:
        ConfigError: the scaling is not supported or lacks a key.
    """
    scaling = config.section("rope_scaling") or config.section("rope_parameters")
    scaling = scaling or ConfigFile({}, "")
    for source in (config, scaling):
        if source.value("partial_rotary_factor") not in (None, 1):
            raise source.error("partial_rotary_factor", "is not supported unless it is 1")
    key = "rope_type" if "rope_type" in scaling else "type"
    kind = scaling.text(key, "default", _SCALINGS)
    theta = scaling.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    unscaled = 1.0 / theta**exponents
    frequencies, scale = _SCALINGS[kind](scaling, unscaled, theta, max_positions)
    return Rope(tuple(frequencies.tolist()), scale)


def _default(
    scaling: ConfigFile, unscaled: Tensor, theta: float, max_positions: int
) -> tuple[Tensor, float]:
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
    trained = scaling.integer("original_max_position_embeddings", max_positions)
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
    factor = scaling.number("factor")
    trained = scaling.integer("original_max_position_embeddings", max_positions)
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


def _divided(
    scaling: ConfigFile, unscaled: Tensor, theta: float, max_positions: int
) -> tuple[Tensor, float]:
    """GGUF: any scaling of single frequencies, such as llama3, as one divisor for each."""
    divisors, count = scaling.value("divisors"), len(unscaled)
    is_list = isinstance(divisors, list) and len(divisors) == count
    if not is_list or not all(type(divisor) is float and divisor > 0 for divisor in divisors):
        raise scaling.error("divisors", f"must be a list of {count} numbers above zero")
    return unscaled / torch.tensor(divisors), 1.0


_SCALINGS: dict[str, Callable[[ConfigFile, Tensor, float, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "divided": _divided,
}

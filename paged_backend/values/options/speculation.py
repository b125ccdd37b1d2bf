"""Speculative decoding: where the guesses come from, and how many a step verifies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.validation import Rule, check_fields, checked, from_mapping, shorten

OPTION = "speculative_config"
METHODS = ("ngram", "suffix")
MAX_DRAFTS = 64
_MAX_MATCH = 64
# vLLM's other methods need a second model or parts of one.
_OTHER_METHODS = ("draft_model", "eagle", "eagle3", "mtp", "medusa", "mlp_speculator", "dflash")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The fields of ``speculative_config``, which are vLLM's.

    Raises:
        ConfigError: a field has the wrong type or lies outside its range.
    """

    method: str = checked("suffix", Rule(str))
    num_speculative_tokens: int = checked(16, Rule(int, 1, MAX_DRAFTS))
    prompt_lookup_min: int | None = checked(None, Rule(int, 1, _MAX_MATCH, optional=True))
    prompt_lookup_max: int | None = checked(None, Rule(int, 1, _MAX_MATCH, optional=True))
    suffix_decoding_max_tree_depth: int = checked(24, Rule(int, 2, _MAX_MATCH))
    suffix_decoding_max_cached_requests: int = checked(10_000, Rule(int, 0, 2**20))
    suffix_decoding_max_spec_factor: float = checked(1.0, Rule(float, 0.01, 64))
    suffix_decoding_min_token_prob: float = checked(0.1, Rule(float, 0, 1))

    def __post_init__(self) -> None:
        check_fields(self, _refuse)
        if self.method in _OTHER_METHODS:
            raise _refuse("method", f"{self.method} is not supported; use ngram or suffix")
        if self.method not in METHODS:
            raise _refuse("method", f"must be ngram or suffix, got {shorten(self.method)}")
        low, high = self.lookup_lengths
        if low > high:
            raise _refuse(
                "prompt_lookup_min", f"must not exceed prompt_lookup_max ({high}), got {low}"
            )

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> SpeculativeConfig:
        """Build from the value of the option.

        Raises:
            ConfigError: a name is unknown or a value is not allowed.
        """
        return from_mapping(cls, values, _refuse)

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The shortest and the longest run of tokens that ``ngram`` looks for; vLLM's defaults."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low is None:
            low = 5 if high is None else high
        return low, low if high is None else high


def describe_fields() -> str:
    """Return the names of the fields with their defaults."""
    return ", ".join(
        spec.name if spec.default is None else f"{spec.name} ({spec.default})"
        for spec in fields(SpeculativeConfig)
    )


def _refuse(name: str, problem: str) -> ConfigError:
    return option_error(f"{OPTION}.{name}", problem)

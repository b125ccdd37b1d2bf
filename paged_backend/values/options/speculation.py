"""Speculative decoding: where the guesses come from, and how many a step verifies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.validation import Rule, check_fields, checked, from_mapping, shorten

OPTION = "speculative_config"
DRAFT_MODEL = "draft_model"
MTP = "mtp"
METHODS = ("ngram", "suffix", DRAFT_MODEL, MTP)
_CHOICE = "ngram, suffix, draft_model or mtp"
MAX_DRAFTS = 64
_MAX_MATCH = 64
# vLLM's other methods need checkpoints of layers that guess from hidden states of the model.
_OTHER_METHODS = ("eagle", "eagle3", "medusa", "mlp_speculator", "dflash")


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """The fields of ``speculative_config``, which are vLLM's.

    Raises:
        ConfigError: a field has the wrong type or lies outside its range.
    """

    method: str = checked("suffix", Rule(str))
    model: str | None = checked(None, Rule(str, optional=True))
    num_speculative_tokens: int = checked(16, Rule(int, 1, MAX_DRAFTS))
    prompt_lookup_min: int | None = checked(None, Rule(int, 1, _MAX_MATCH, optional=True))
    prompt_lookup_max: int | None = checked(None, Rule(int, 1, _MAX_MATCH, optional=True))
    suffix_decoding_max_tree_depth: int = checked(24, Rule(int, 2, _MAX_MATCH))
    suffix_decoding_max_cached_requests: int = checked(10_000, Rule(int, 0, 2**20))
    suffix_decoding_max_spec_factor: float = checked(4.0, Rule(float, 0.01, 64))
    suffix_decoding_min_token_prob: float = checked(0.1, Rule(float, 0, 1))

    def __post_init__(self) -> None:
        check_fields(self, _refuse)
        if self.method in _OTHER_METHODS:
            raise _refuse("method", f"{self.method} is not supported; use {_CHOICE}")
        if self.method not in METHODS:
            raise _refuse("method", f"must be {_CHOICE}, got {shorten(self.method)}")
        if (self.model is not None) != (self.method == DRAFT_MODEL):
            raise _refuse("model", f"is the draft model of the method {DRAFT_MODEL}, and only its")
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

    @staticmethod
    def resolved(values: Any, base: Path) -> Any:
        """Return the value of the option with the absolute path of a draft model in a folder.

        Args:
            values: the value, which is not checked yet.
            base: the folder that a relative path begins at.
        """
        model = values.get("model") if isinstance(values, dict) else None
        if not isinstance(model, str) or not (base / model).exists():
            return values
        return {**values, "model": str((base / model).resolve())}

    @property
    def is_drawn_by_worker(self) -> bool:
        """True if the worker draws the drafts: with a draft model, or with the MTP layer."""
        return self.method in (DRAFT_MODEL, MTP)

    @property
    def match_lengths(self) -> tuple[int, int]:
        """The shortest and the longest run of equal tokens that a drafter looks for."""
        if self.method == "suffix":
            return 1, self.suffix_decoding_max_tree_depth
        return self.lookup_lengths

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The same for ``ngram``, with vLLM's defaults."""
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

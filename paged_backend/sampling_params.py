"""How one request wants its tokens chosen and where it wants them to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paged_backend.errors import InvalidRequest
from paged_backend.validation import Rule, check_fields, checked, from_mapping, shorten

MAX_N = 64
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """A user's choices, checked when made; names, meanings and defaults are vLLM's.

    Raises:
        InvalidRequest: a field has the wrong type or lies outside its range.
    """

    n: int = checked(1, Rule(int, 1, MAX_N), "answers to one prompt")
    temperature: float = checked(1.0, Rule(float, 0, 100), "0 is greedy")
    top_k: int = checked(0, Rule(int, -1, INT32_MAX), "keep the k likeliest; 0 or -1 keeps all")
    top_p: float = checked(1.0, Rule(float, high=1, above=0), "keep the likeliest mass p")
    min_p: float = checked(0.0, Rule(float, 0, 1), "drop tokens below min_p times the likeliest")
    repetition_penalty: float = checked(
        1.0, Rule(float, high=100, above=0), "over 1 makes tokens seen in prompt or output rarer"
    )
    presence_penalty: float = checked(
        0.0, Rule(float, -2, 2), "subtracted once for tokens in the output"
    )
    frequency_penalty: float = checked(
        0.0, Rule(float, -2, 2), "subtracted for each occurrence in the output"
    )
    seed: int | None = checked(
        None, Rule(int, 0, 2**64 - 1, optional=True), "same seed, same tokens"
    )
    max_tokens: int | None = checked(
        16, Rule(int, 1, INT32_MAX, optional=True), "null: up to max_model_len"
    )
    min_tokens: int = checked(0, Rule(int, 0, INT32_MAX), "no stop before that many tokens")
    ignore_eos: bool = checked(False, Rule(bool), "go on after the end-of-sequence token")
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = checked(False, Rule(bool), "keep the stop in the text")
    skip_special_tokens: bool = checked(True, Rule(bool), "leave special tokens out of the text")

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))
        check_fields(self, InvalidRequest)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens",
                f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from untrusted names and values.

        Raises:
            InvalidRequest: a name is unknown or a value is not allowed.
        """
        return from_mapping(cls, values, InvalidRequest)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens that came before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


def _stop_strings(value: object) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if items is None:
        return ()
    if not isinstance(items, (list, tuple)) or not all(isinstance(item, str) for item in items):
        raise InvalidRequest("stop", f"must be a string or a list of strings, got {shorten(value)}")
    if len(items) > MAX_STOP_STRINGS:
        raise InvalidRequest("stop", f"at most {MAX_STOP_STRINGS} strings, got {len(items)}")
    for item in items:
        if not 1 <= len(item) <= MAX_STOP_LENGTH:
            raise InvalidRequest(
                "stop", f"each string has 1 to {MAX_STOP_LENGTH} characters, got {len(item)}"
            )
    return tuple(items)


def _stop_token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest("stop_token_ids", f"must be a list of integers, got {shorten(value)}")
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest("stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS}, got {len(value)}")
    rule = Rule(int, 0, INT32_MAX)
    for item in value:
        if not rule.accepts(item):
            raise InvalidRequest(
                "stop_token_ids", f"each must be {rule.describe()}, got {shorten(item)}"
            )
    return tuple(value)

"""The sampling parameters and stop conditions of a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import Any

from paged_backend.values.beams import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    check_beams,
    read_beams,
)
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.neutral_values import SAMPLING, Neutral, without_neutral
from paged_backend.values.structured_outputs import StructuredOutputsParams, take_from
from paged_backend.values.validation import (
    Rule,
    check_fields,
    check_known,
    checked,
    is_text,
    shorten,
)

MAX_N = 64
DEFAULT_MAX_TOKENS = 16
MAX_STOP_STRINGS = 256  # the highest value of max_stop_strings, which is 16 by default
MAX_STOP_LENGTH = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 128
MAX_WORD_LENGTH = 64  # characters, or tokens
MAX_ALLOWED_TOKEN_IDS = 2**18
INT32_MAX = 2**31 - 1
_NO_SEED = -1  # vLLM's
_BEAM_NAMES = {
    *("beam_width", "use_beam_search", "num_return_sequences"),
    *("length_penalty", "early_stopping"),
}

_TOKEN_ID = Rule(int, 0, INT32_MAX)
_BIAS = Rule(float, -100, 100)
_INPUTS = (
    *("tools", "tool_choice", "parallel_tool_calls"),
    *("return_context_logits", "return_generation_logits"),
)


def _read_other_names(cls: type[SamplingParams]) -> type[SamplingParams]:
    """Let a class take constraints in every form, and parameters that it lacks if they are neutral.

    msgspec, which reads the parameters in messages between processes, makes objects without this.
    """
    make = cls.__init__
    own = {spec.name: spec.metadata.get("rule") for spec in fields(cls)}
    required = {name for name, rule in own.items() if rule is not None and not rule.optional}

    @wraps(make)
    def read(self: SamplingParams, /, **values: Any) -> None:
        if any(value is None for value in values.values()):  # null stands for the default
            values = {k: v for k, v in values.items() if v is not None or k not in required}
        if not _BEAM_NAMES.isdisjoint(values):
            values = read_beams(values)
        if not values.keys() <= own.keys():
            values = _without_other_names(values)
        elif values.get("structured_outputs") is not None:
            values["structured_outputs"] = take_from(values)
        check_known(values, own, InvalidRequest)
        make(self, **values)

    setattr(cls, "__init__", read)  # noqa: B010  # mypy forbids the assignment
    return cls


def _without_other_names(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = without_neutral(values, _neutral_beside(values), InvalidRequest)
    constraint = take_from(kept)
    return {**kept, "structured_outputs": constraint}


def _neutral_beside(values: Mapping[str, Any]) -> dict[str, Neutral]:
    """Return the parameters that this engine lacks, with neutral values for all others."""
    spaces = (True,) if values.get("skip_special_tokens") is False else (True, False)
    return SAMPLING | {
        "best_of": ((values.get("n") or 1,), "all n answers are returned"),
        "spaces_between_special_tokens": (spaces, "the text is as the tokenizer decodes it"),
    }


@_read_other_names
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, checked when made; names, meanings and defaults are vLLM's.

    A constraint on the output can be given in each form that docs/protocols.md lists. Parameters
    that this engine lacks may have neutral values.

    Raises:
        InvalidRequest: a name is unknown, or a field has the wrong type or lies outside its range.
    """

    n: int = checked(1, Rule(int, 1, MAX_N), "answers to one prompt")
    beam_width: int = checked(
        1, Rule(int, 1, MAX_BEAM_WIDTH), "beams of a beam search; 1 searches not, but samples"
    )
    length_penalty: float = checked(
        1.0,
        Rule(float, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
        "beams are compared by the sum of logprobs / length ** length_penalty",
    )
    early_stopping: bool | str = False  # True, False or "never", as in transformers
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
        None,
        Rule(int, 0, 2**64 - 1, optional=True),
        "the same seed makes the same draws from equal logits, on any device; -1: none",
    )
    max_tokens: int | None = checked(
        DEFAULT_MAX_TOKENS,
        Rule(int, 1, INT32_MAX, optional=True),
        "null: up to max_output_tokens, or max_model_len",
    )
    min_tokens: int = checked(0, Rule(int, 0, INT32_MAX), "no stop before that many tokens")
    ignore_eos: bool = checked(False, Rule(bool), "go on after the end-of-sequence token")
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_special_tokens: bool = checked(
        False, Rule(bool), "stop strings match special tokens that the text leaves out, too"
    )
    include_stop_str_in_output: bool = checked(False, Rule(bool), "keep the stop in the text")
    skip_special_tokens: bool = checked(True, Rule(bool), "leave special tokens out of the text")
    logprobs: int | None = checked(
        None,
        Rule(int, 0, MAX_LOGPROBS, optional=True),
        "log-probabilities of each token and of so many of the likeliest, before any adjustment",
    )
    prompt_logprobs: int | None = checked(
        None, Rule(int, 0, MAX_LOGPROBS, optional=True), "the same for the prompt's tokens"
    )
    return_context_logits: bool = checked(
        False, Rule(bool), "the model's logits at each token of the prompt, with its logprobs"
    )
    return_generation_logits: bool = checked(
        False, Rule(bool), "the logits that each token was sampled from, before any adjustment"
    )
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, added to its logit
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens that are sampled; empty: all tokens
    bad_words: tuple[str, ...] = ()  # never completed; tokenized where there is a tokenizer
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    structured_outputs: StructuredOutputsParams | None = None  # what the output must look like

    def __post_init__(self) -> None:
        if type(self.seed) is int and self.seed == _NO_SEED:
            object.__setattr__(self, "seed", None)
        for name, read in _LISTS.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))
        check_fields(self, InvalidRequest)
        check_beams(self.beam_width, self.n, self.length_penalty, self.early_stopping)
        if self.return_context_logits and self.prompt_logprobs is None:
            object.__setattr__(self, "prompt_logprobs", 0)
        if (self.return_context_logits or self.return_generation_logits) and self.logprobs is None:
            object.__setattr__(self, "logprobs", 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                "min_tokens",
                f"must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}",
            )
        if self.structured_outputs is not None and self.min_tokens > 0:
            raise InvalidRequest(
                "min_tokens", "must be 0: structured_outputs decides where the output may end"
            )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from untrusted names and values.

        Raises:
            InvalidRequest: a name is unknown or a value is not allowed.
        """
        for name in _INPUTS:
            if name in values:
                raise InvalidRequest(name, "is a separate input, not a sampling parameter")
        return cls(**values)

    @property
    def penalized(self) -> bool:
        """Whether a penalty changes logits by the tokens before them."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def adjusts_tokens(self) -> bool:
        """Whether the logits of particular tokens are changed, or tokens are forbidden."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_words_token_ids)

    @property
    def reads_tokens(self) -> bool:
        """True if a bad word has several tokens, so that the output is searched for it."""
        return any(len(word) > 1 for word in self.bad_words_token_ids)

    def named_token_ids(self) -> Iterator[tuple[str, int]]:
        """Yield each token id in the parameters, with the name of its field."""
        yield from (("stop_token_ids", token) for token in self.stop_token_ids)
        yield from (("logit_bias", token) for token, _ in self.logit_bias)
        yield from (("allowed_token_ids", token) for token in self.allowed_token_ids)
        for word in self.bad_words_token_ids:
            yield from (("bad_words_token_ids", token) for token in word)


def _strings(name: str, value: object, *, max_number: int, max_length: int) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else value
    if items is None:
        return ()
    if not isinstance(items, (list, tuple)) or not all(map(is_text, items)):
        raise InvalidRequest(name, f"must be a string or a list of strings, got {shorten(value)}")
    if len(items) > max_number:
        raise InvalidRequest(name, f"at most {max_number} strings, got {len(items)}")
    for item in items:
        if not 1 <= len(item) <= max_length:
            raise InvalidRequest(
                name, f"each string has 1 to {max_length} characters, got {len(item)}"
            )
    return tuple(items)


def _token_ids(name: str, value: object, *, max_number: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(name, f"must be a list of integers, got {shorten(value)}")
    if len(value) > max_number:
        raise InvalidRequest(name, f"at most {max_number}, got {len(value)}")
    for item in value:
        _check(name, _TOKEN_ID, item)
    return tuple(value)


def _bad_words(name: str, value: object) -> tuple[tuple[int, ...], ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise InvalidRequest(name, f"must be a list of lists of integers, got {shorten(value)}")
    if len(value) > 2 * MAX_BAD_WORDS:  # a word has two spellings, with a space before it or not
        raise InvalidRequest(name, f"at most {2 * MAX_BAD_WORDS}, got {len(value)}")
    words = tuple(_token_ids(name, word, max_number=MAX_WORD_LENGTH) for word in value)
    if not all(words):
        raise InvalidRequest(name, "each list has at least one token id")
    return words


def _logit_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    """Return pairs of token id and bias, from a JSON object with string keys or from pairs."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        value = [(_integer(token), bias) for token, bias in value.items()]
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in value
    ):
        raise InvalidRequest(name, f"must be an object of token ids, got {shorten(value)}")
    if len(value) > MAX_LOGIT_BIAS:
        raise InvalidRequest(name, f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
    for token, bias in value:
        _check(name, _TOKEN_ID, token)
        _check(name, _BIAS, bias)
    return tuple((token, float(bias)) for token, bias in dict(value).items())


def _integer(text: object) -> object:
    return int(text) if isinstance(text, str) and text.isdecimal() and len(text) < 12 else text


def _check(name: str, rule: Rule, item: object) -> None:
    if not rule.accepts(item):
        raise InvalidRequest(name, f"each must be {rule.describe()}, got {shorten(item)}")


_LISTS: dict[str, Callable[[str, object], object]] = {
    "stop": partial(_strings, max_number=MAX_STOP_STRINGS, max_length=MAX_STOP_LENGTH),
    "stop_token_ids": partial(_token_ids, max_number=MAX_STOP_TOKEN_IDS),
    "logit_bias": _logit_bias,
    "allowed_token_ids": partial(_token_ids, max_number=MAX_ALLOWED_TOKEN_IDS),
    "bad_words": partial(_strings, max_number=MAX_BAD_WORDS, max_length=MAX_WORD_LENGTH),
    "bad_words_token_ids": _bad_words,
}

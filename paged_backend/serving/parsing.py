"""From a caller's tensors to a checked request; every mistake is named here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from paged_backend.errors import InvalidRequest
from paged_backend.request import Request, RequestLimits
from paged_backend.sampling_params import SamplingParams
from paged_backend.serving.contract import Array
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.validation import Rule, shorten

MAX_JSON_BYTES = 256 * 1024
MAX_CACHE_SALT_LENGTH = 256
RESERVED_PREFIX = "triton_"  # parameters of Triton's own, not of the request

Tensors = Mapping[str, Array]
"""Input tensors by name; absent ones are missing."""


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the caller wants the answer sent."""

    stream: bool
    echo: bool  # the prompt's text goes before the answer's
    return_finish_reason: bool
    return_num_input_tokens: bool
    return_num_output_tokens: bool
    return_output_ids: bool


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """All that one call asks for."""

    request: Request
    options: AnswerOptions
    prompt_text: str  # empty unless it is echoed


class RequestParser:
    """Checks calls against one loaded model."""

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        # No more characters than this can become a prompt that fits; longer text is not tokenised.
        self._max_text_length = limits.max_model_len * tokenizer.max_token_length

    def parse(self, request_id: str, tensors: Tensors, parameters_json: str) -> ParsedRequest:
        """Check one call.

        Args:
            request_id: the id that the engine will know it by.
            tensors: the call's input tensors.
            parameters_json: the call's request parameters, a JSON object or empty.

        Raises:
            InvalidRequest: naming the field and the allowed range.
        """
        options = _options(tensors)
        params, cache_salt = self._sampling(tensors, parameters_json)
        text, prompt_token_ids = self._prompt(tensors)
        self._limits.check(prompt_token_ids, params)
        if options.echo and text is None:
            text = self._tokenizer.decode(
                prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        request = Request(request_id, prompt_token_ids, params, cache_salt)
        return ParsedRequest(request, options, (text or "") if options.echo else "")

    def _prompt(self, tensors: Tensors) -> tuple[str | None, list[int]]:
        has_text, has_ids = "text_input" in tensors, "input_ids" in tensors
        if has_text and has_ids:
            raise InvalidRequest("text_input", "give either text_input or input_ids, not both")
        if has_ids:
            return None, tensors["input_ids"].reshape(-1).tolist()
        if not has_text:
            raise InvalidRequest("text_input", "is missing; give text_input or input_ids")
        text = _string("text_input", tensors["text_input"])
        if len(text) > self._max_text_length:
            raise InvalidRequest(
                "text_input",
                f"has {len(text)} characters, more than max_model_len "
                f"({self._limits.max_model_len}) tokens can hold",
            )
        return text, self._tokenizer.encode(text)

    def _sampling(self, tensors: Tensors, parameters_json: str) -> tuple[SamplingParams, str]:
        if "sampling_parameters" in tensors:
            name = "sampling_parameters"
            values = _json_object(name, _string(name, tensors[name]))
        else:
            values = _json_object("parameters", parameters_json or "{}")
            values = {k: v for k, v in values.items() if not k.startswith(RESERVED_PREFIX)}
        cache_salt = values.pop("cache_salt", "")
        if not isinstance(cache_salt, str) or len(cache_salt) > MAX_CACHE_SALT_LENGTH:
            raise InvalidRequest(
                "cache_salt", f"must be a string of at most {MAX_CACHE_SALT_LENGTH} characters"
            )
        return SamplingParams.from_mapping(_coerce(values)), cache_salt


def _options(tensors: Tensors) -> AnswerOptions:
    stream = _flag(tensors, "stream")
    if stream and not _flag(tensors, "exclude_input_in_output", default=True):
        # vllm_backend's own words: its clients compare them.
        raise InvalidRequest.verbatim(
            "exclude_input_in_output",
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not "
            "allowed.",
        )
    return AnswerOptions(
        stream=stream,
        echo=not _flag(tensors, "exclude_input_in_output", default=stream),
        return_finish_reason=_flag(tensors, "return_finish_reason"),
        return_num_input_tokens=_flag(tensors, "return_num_input_tokens"),
        return_num_output_tokens=_flag(tensors, "return_num_output_tokens"),
        return_output_ids=_flag(tensors, "return_output_ids"),
    )


def _flag(tensors: Tensors, name: str, *, default: bool = False) -> bool:
    return bool(_single(name, tensors[name])) if name in tensors else default


def _single(name: str, tensor: Array) -> Any:
    if tensor.size != 1:
        raise InvalidRequest(name, f"must hold one element, got {tensor.size}")
    return tensor.reshape(-1)[0]


def _string(name: str, tensor: Array) -> str:
    value = _single(name, tensor)
    try:
        return value if isinstance(value, str) else bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(name, f"is not valid UTF-8 at byte {error.start}") from error


def _json_object(name: str, text: str) -> dict[str, Any]:
    if len(text) > MAX_JSON_BYTES:
        raise InvalidRequest(name, f"has over {MAX_JSON_BYTES} characters")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(name, f"is not valid JSON: {shorten(str(error))}") from error
    if not isinstance(values, dict):
        raise InvalidRequest(name, f"must be a JSON object, got {shorten(values)}")
    return values


def _coerce(values: Mapping[str, Any]) -> dict[str, Any]:
    """Read numbers and truth values that clients of vllm_backend send as strings."""
    rules: dict[str, Rule] = {
        spec.name: spec.metadata["rule"]
        for spec in fields(SamplingParams)
        if "rule" in spec.metadata
    }
    return {
        name: _from_string(rules[name].kind, value)
        if isinstance(value, str) and name in rules
        else value
        for name, value in values.items()
    }


def _from_string(kind: type, text: str) -> Any:
    """The value that a string stands for, or the string itself where it stands for none."""
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return kind(text)
    except ValueError:
        return text

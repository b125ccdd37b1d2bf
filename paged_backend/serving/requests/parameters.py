"""Reads the parameters of a request: single names early, and all of them once.

The thread that admits all requests looks for single names only, as decoding all parameters may
take milliseconds. The thread that prepares a request decodes them.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Mapping
from typing import Any

import msgspec

from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import MAX_NAME_LENGTH, NOT_ENABLED
from paged_backend.values.request import RequestLimits, RequestOptions
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.validation import coerce, shorten

CALL_ID = "call_id"
LORA_NAME = "lora_name"
OWN, SAMPLING = "parameters", "sampling_parameters"  # the fields that may hold the parameters
RESERVED_PREFIX = "triton_"  # parameters of Triton's own, not of the request

_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_CALL_ID_JSON = 6 * 64 + 2  # characters, each of which may be written as six
_ESCAPE = "\\u"  # JSON may write the letters of a name so, too
# Names of the prompt in other APIs.
_PROMPT_ELSEWHERE = ("prompt", "inputs")


class RequestParameters:
    """The parameters of a request. They are decoded when they are first used, and kept.

    Args:
        tensors: input tensors of the request.
        own_json: the request's own parameters, a JSON object or empty.
        limits: limits of requests.
    """

    def __init__(self, tensors: Tensors, own_json: str, limits: RequestLimits) -> None:
        self._tensors = tensors
        self._own_json = own_json
        self._limits = limits

    @functools.cached_property
    def sampling(self) -> Mapping[str, Any]:
        """The sampling parameters, and the other parameters for the engine, by name.

        They are read from the tensor ``sampling_parameters``, or from the request's parameters if
        there is no such tensor. The tensors ``stop``, ``bad_words``, ``stop_token_ids`` and
        ``allowed_token_ids`` take precedence. Strings become numbers and booleans where necessary;
        the values are not checked.

        Raises:
            InvalidRequest: they cannot be read.
        """
        values = self._decoded()
        if not self._limits.has_adapters and values.pop(LORA_NAME, None) is not None:
            raise InvalidRequest.verbatim(LORA_NAME, NOT_ENABLED)
        for name in _PROMPT_ELSEWHERE:
            if name in values:
                raise InvalidRequest(name, "is not known; the prompt's name here is text_input")
        for name in ("stop", "bad_words"):
            if name in self._tensors:
                values[name] = fields.strings(name, self._tensors[name])
        for name in ("stop_token_ids", "allowed_token_ids"):
            if name in self._tensors:
                values[name] = fields.elements(name, self._tensors[name])
        return coerce(SamplingParams, values)

    def _decoded(self) -> dict[str, Any]:
        if SAMPLING in self._tensors:
            return self._object(SAMPLING, fields.string(SAMPLING, self._tensors[SAMPLING]))
        return {
            name: value
            for name, value in self._own().items()
            if name != CALL_ID and not name.startswith(RESERVED_PREFIX)
        }

    @property
    def tenant(self) -> str:
        """The tenant in the request's own parameters, for tasks without sampling parameters.

        Raises:
            InvalidRequest: the parameters cannot be read, or the tenant is invalid.
        """
        return RequestOptions.take_from({"tenant": self._own().get("tenant", "")}).tenant

    def _own(self) -> dict[str, Any]:
        return self._object(OWN, self._own_json or "{}")

    def _object(self, name: str, source: str) -> dict[str, Any]:
        check_json_length(name, len(source), self._limits)
        return fields.json_object(name, source, self._limits.max_json_depth)


def take_lora_name(values: dict[str, Any]) -> str:
    """Remove the name of a LoRA adapter from a request's parameters; empty for none.

    Raises:
        InvalidRequest: it is no name.
    """
    name = values.pop(LORA_NAME, None)
    if name is None:
        return ""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidRequest(LORA_NAME, f"must be a string of 1 to {MAX_NAME_LENGTH} characters")
    return name


def check_json_length(name: str, length: int, limits: RequestLimits) -> None:
    """Refuse JSON that is too long.

    Args:
        name: name of the field that has it.
        length: number of its characters.
        limits: limits of requests.

    Raises:
        InvalidRequest: naming the field.
    """
    if length > limits.max_json_length:
        raise InvalidRequest(
            name, f"has over {limits.max_json_length} characters (max_json_length)"
        )


def has_text(source: str | bytes, text: str) -> bool:
    """Return True if a text is in JSON as it is; its letters may be escaped there instead."""
    return text.encode() in source if isinstance(source, bytes) else text in source


def has_escapes(source: str | bytes) -> bool:
    """Return True if letters of a name may be escaped in JSON."""
    return has_text(source, _ESCAPE)


def _may_have_name(source: str | bytes, name: str) -> bool:
    """Return False if no object of a JSON text has a name, without parsing it."""
    return has_text(source, f'"{name}"') or has_escapes(source)


class _Named(msgspec.Struct):
    """The parameters that are read before the others, which are skipped."""

    call_id: msgspec.Raw = msgspec.Raw()


class _Charged(msgspec.Struct):
    tenant: str = ""


_NAMED = msgspec.json.Decoder(_Named)
_CHARGED = msgspec.json.Decoder(_Charged)


def tenant_of(tensors: Tensors, parameters_json: str) -> str:
    """Return the tenant that a request is charged to; empty if its parameters cannot be read.

    This skips what else the parameters hold, which takes 1 ms for a megabyte. They are checked when
    the request is prepared.
    """
    source: str | bytes = parameters_json
    if SAMPLING in tensors:
        tensor = tensors[SAMPLING].reshape(-1)
        source = tensor[0] if tensor.size == 1 else ""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeError, RecursionError, TypeError):
        if _may_have_name(source, "tenant"):
            return _CHARGED.decode(source).tenant
    return ""


def call_id_of(tensors: Tensors, parameters_json: str) -> str:
    """Return the name that the client gave to the request, by which it can be canceled.

    The name is a tensor or a parameter. An ensemble always passes parameters on, but a tensor
    only if its configuration declares it. It is empty if the client gave none. The caller has
    checked how long the parameters' JSON is.

    Raises:
        InvalidRequest: the name is invalid, or the tensor and the parameter differ.
    """
    names: list[object] = []
    if CALL_ID in tensors:
        names.append(fields.string(CALL_ID, tensors[CALL_ID]))
    if _may_have_name(parameters_json, CALL_ID):
        names += _call_ids(parameters_json)
    for name in names:
        if not isinstance(name, str) or not _CALL_ID.fullmatch(name):
            problem = "must have 1 to 64 letters, digits, '_' and '-', got "
            raise InvalidRequest(CALL_ID, problem + shorten(name))
    if len(set(names)) > 1:
        raise InvalidRequest(CALL_ID, "must be the same as a tensor and as a parameter")
    return str(names[0]) if names else ""


def _call_ids(parameters_json: str) -> list[object]:
    """Return the name in a request's parameters, unchecked, if there is one.

    Raises:
        InvalidRequest: the parameters cannot be read.
    """
    try:
        raw = bytes(_NAMED.decode(parameters_json).call_id)
        if len(raw) > _MAX_CALL_ID_JSON:  # too long for any valid name
            return [raw.decode()]
        return [msgspec.json.decode(raw)] if raw else []
    except msgspec.ValidationError as error:
        raise InvalidRequest(OWN, "must be a JSON object") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest(OWN, f"is not valid JSON: {shorten(str(error))}") from error

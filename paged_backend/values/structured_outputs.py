"""The constraint on a request's output, in the forms that clients of several servers use."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from paged_backend.values.errors import InvalidRequest
from paged_backend.values.neutral_values import STRUCTURED, without_neutral
from paged_backend.values.validation import (
    Rule,
    check_fields,
    check_known,
    checked,
    is_text,
    shorten,
)

NAME = "structured_outputs"
OLDER_NAME = "guided_decoding"  # the same before vLLM 0.12
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 4096
MAX_LENGTH = 2**17  # characters of a constraint
RESPONSE_FORMATS = ("text", "json_object", "json_schema", "structural_tag")
# Kinds by the name that tensorrtllm_backend gives them, and its parameters.
GUIDE_KINDS = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
GUIDE_TYPE, GUIDE = "guided_decoding_guide_type", "guided_decoding_guide"
# Parameters by the names that vLLM had for them before 0.12.
GUIDED_NAMES = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_whitespace_pattern": "whitespace_pattern",
}
_GUIDED_OPTIONS = {"whitespace_pattern": "guided_whitespace_pattern"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A constraint on the output, checked when made; names and meanings are vLLM's.

    Exactly one constraint must be given. A schema or a structural tag may be given as an object; it
    is kept as JSON text.

    Attributes:
        json: a JSON schema; the output is a document that is valid by it.
        regex: a regular expression that the whole output matches.
        choice: strings, one of which is the output.
        grammar: a grammar that the output follows, in GBNF (which xgrammar calls EBNF) or Lark.
        json_object: true for any JSON object.
        structural_tag: parts of the output that are constrained.

    Raises:
        InvalidRequest: there is not exactly one constraint, or a value has the wrong type.
    """

    json: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = checked(False, Rule(bool), "JSON without optional whitespace")
    disable_additional_properties: bool = checked(
        False, Rule(bool), "objects have only the properties that the schema names"
    )
    whitespace_pattern: str | None = checked(
        None, Rule(str, max_length=256, optional=True), "regular expression of JSON's whitespace"
    )
    origin: str = field(default=NAME, compare=False, repr=False)  # the client's name, for errors

    def __post_init__(self) -> None:
        given = [kind for kind in KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            known = ", ".join(KINDS)
            name = self.origin if self.origin in (NAME, OLDER_NAME) else NAME
            raise InvalidRequest(name, f"must have exactly one of {known}, got {_list(given)}")
        (kind,) = given
        try:
            object.__setattr__(self, kind, _READERS[kind](getattr(self, kind)))
        except ValueError as error:
            raise self.error(str(error)) from None
        check_fields(self, self._refuse)

    @classmethod
    def of(cls, value: object, origin: str = NAME) -> StructuredOutputsParams:
        """Build from a client's value: a JSON object or its text.

        Args:
            value: the constraint; one of this class is returned as it is.
            origin: the client's name for it.

        Raises:
            InvalidRequest: a name is unknown or a value is not allowed.
        """
        if isinstance(value, cls):
            return value

        def refuse(field: str, problem: str) -> InvalidRequest:
            return InvalidRequest(f"{origin}.{field}", problem)

        values = without_neutral(parse_object(origin, value), STRUCTURED, refuse)
        check_known(values, (spec.name for spec in fields(cls) if spec.name != "origin"), refuse)
        return cls(**_without_nulls(values), origin=origin)

    @property
    def kind(self) -> str:
        """The name of the constraint that is given."""
        return next(kind for kind in KINDS if getattr(self, kind) is not None)

    @property
    def content(self) -> str:
        """The text of a constraint that is one text."""
        return str(getattr(self, self.kind))

    def as_json(self) -> dict[str, Any]:
        """Return what the client has given, by name; ``of`` reads it."""
        given = {name: value for name, value in asdict(self).items() if value}
        del given["origin"]
        return given

    def error(self, problem: str) -> InvalidRequest:
        """Return an error that names the constraint as the client did."""
        return self._refuse(self.kind, problem)

    def _refuse(self, field: str, problem: str) -> InvalidRequest:
        if self.origin in (NAME, OLDER_NAME):
            return InvalidRequest(f"{self.origin}.{field}", problem)
        return InvalidRequest(_GUIDED_OPTIONS.get(field, self.origin), problem)


def from_response_format(value: object) -> StructuredOutputsParams | None:
    """Read OpenAI's ``response_format``; None for plain text.

    Raises:
        InvalidRequest: it is not one of the known forms.
    """
    name = "response_format"
    values = parse_object(name, value)
    kind = values.get("type")
    if kind not in RESPONSE_FORMATS:
        known = ", ".join(RESPONSE_FORMATS)
        raise InvalidRequest(f"{name}.type", f"must be one of {known}, got {shorten(kind)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return StructuredOutputsParams(json_object=True, origin=name)
    if kind == "structural_tag":
        return StructuredOutputsParams(structural_tag=values, origin=name)
    wrapped = values.get("json_schema")
    if not isinstance(wrapped, Mapping) or "schema" not in wrapped:
        raise InvalidRequest(f"{name}.json_schema", "must be an object with a schema")
    return StructuredOutputsParams(json=wrapped["schema"], origin=f"{name}.json_schema.schema")


def from_guide(kind: object, guide: object) -> dict[str, Any]:
    """Translate tensorrtllm_backend's ``guided_decoding_guide_type`` and ``guided_decoding_guide``.

    Raises:
        InvalidRequest: the type is unknown, or the guide is missing.
    """
    if kind == "json":
        return {"json_object": True}
    if not isinstance(kind, str) or kind not in GUIDE_KINDS:
        known = ", ".join(("json", *GUIDE_KINDS))
        raise InvalidRequest(GUIDE_TYPE, f"must be one of {known}, got {shorten(kind)}")
    if guide is None:
        raise InvalidRequest(GUIDE, f"is missing; the type {kind} needs one")
    return {GUIDE_KINDS[kind]: guide}


def take_from(values: dict[str, Any]) -> StructuredOutputsParams | None:
    """Remove the constraint from a request's untrusted parameters, whatever its form.

    Raises:
        InvalidRequest: the constraint is invalid, or is given in two forms.
    """
    found: dict[str, StructuredOutputsParams | None] = {}
    for name in (NAME, OLDER_NAME):
        if (value := values.pop(name, None)) is not None:
            found[name] = StructuredOutputsParams.of(value, name)
    if (value := values.pop("response_format", None)) is not None:
        found["response_format"] = from_response_format(value)
    guided = _without_nulls({name: values.pop(name, None) for name in GUIDED_NAMES})
    if guided.get("guided_json_object") is False:
        del guided["guided_json_object"]
    if guided:
        named = {GUIDED_NAMES[name]: value for name, value in guided.items()}
        origin = next(iter(guided))
        found[origin] = StructuredOutputsParams(**named, origin=origin)
    kind, guide = values.pop(GUIDE_TYPE, None), values.pop(GUIDE, None)
    if kind is not None:
        found[GUIDE] = StructuredOutputsParams(**from_guide(kind, guide), origin=GUIDE)
    elif guide is not None:
        raise InvalidRequest(GUIDE_TYPE, "is missing; it says what the guide is")
    constraints = {name: params for name, params in found.items() if params is not None}
    if len(constraints) > 1:
        raise InvalidRequest(" and ".join(constraints), "exclude each other")
    return next(iter(constraints.values()), None)


def parse_object(name: str, value: object) -> Mapping[str, Any]:
    """Return a JSON object that was given as an object or as text.

    Raises:
        InvalidRequest: it is neither.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            problem = shorten(str(error) or type(error).__name__)
            raise InvalidRequest(name, f"is not valid JSON: {problem}") from error
    if not isinstance(value, Mapping):
        raise InvalidRequest(name, f"must be a JSON object, got {shorten(value)}")
    return value


def _without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _list(names: list[str]) -> str:
    return ", ".join(names) or "none of them"


def _text(value: object) -> str:
    if not is_text(value):
        raise ValueError(f"must be a string, got {shorten(value)}")
    return _checked_length(str(value))


def _json_text(value: object) -> str:
    """Return a schema or structural tag as JSON text, so that it can be hashed and sent."""
    if isinstance(value, str):
        return _text(value)
    if not isinstance(value, (Mapping, bool)):
        raise ValueError(f"must be a JSON object or its text, got {shorten(value)}")
    try:
        return _checked_length(json.dumps(value))
    except (TypeError, RecursionError) as error:
        raise ValueError(f"is not JSON: {shorten(str(error))}") from error


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)) or not value or not all(map(is_text, value)):
        raise ValueError(f"must be a list of one or more strings, got {shorten(value)}")
    if len(value) > MAX_CHOICES:
        raise ValueError(f"at most {MAX_CHOICES} strings, got {len(value)}")
    if "" in value:
        raise ValueError("must not contain an empty string")
    _checked_length("".join(value))
    return tuple(value)


def _true(value: object) -> bool:
    if value is not True:
        raise ValueError(f"must be true, got {shorten(value)}")
    return True


def _checked_length(text: str) -> str:
    if not 1 <= len(text) <= MAX_LENGTH:
        raise ValueError(f"must have 1 to {MAX_LENGTH} characters, got {len(text)}")
    return text


_READERS: dict[str, Callable[[object], object]] = {
    "json": _json_text,
    "regex": _text,
    "choice": _choices,
    "grammar": _text,
    "json_object": _true,
    "structural_tag": _json_text,
}

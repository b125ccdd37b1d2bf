"""Writes grammars for values in other notations than JSON, by the schema of a tool's arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged_backend.grammar.schema_simplify import ANNOTATIONS, allows_all
from paged_backend.grammar.schema_walk import SchemaError
from paged_backend.grammar.writer import GrammarWriter

_IDENTIFIERS = frozenset(("$schema", "$id"))
_KEYWORDS = frozenset(
    (
        *("type", "const", "enum", "anyOf", "items", "properties", "required"),
        "additionalProperties",  # no others are ever written
    )
)
_TYPES = ("string", "number", "boolean", "null", "array", "object")
_INTEGER = r"-?(0|[1-9][0-9]{0,17})"
_NUMBER = rf"{_INTEGER}(\.[0-9]{{1,17}})?([eE][+-]?[0-9]{{1,2}})?"

Schema = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NotationGrammar:
    """The notation of values.

    Attributes:
        string: writes any string.
        quote: returns a given string as it is written.
        true: and so on, how these values are written.
        key: returns the name of a property of an object, with what follows it.
        any_key: regular expression of a property of any name.
        comma: text between two values.
    """

    string: Callable[[GrammarWriter], str]
    quote: Callable[[str], str]
    true: str
    false: str
    null: str
    key: Callable[[str], str]
    any_key: str
    comma: str


def _json_string(writer: GrammarWriter) -> str:
    # The escapes mean the same in Python.
    return writer.regex(r'"([^"\\\x00-\x1f\x7f]|\\["\\nrt])*"')


def _gemma_string(writer: GrammarWriter) -> str:
    # transformers' parser uses these two control characters itself.
    content = writer.text(r'(.|\n)*(<\|"\|>|[\x01\x02])(.|\n)*')
    return writer.rule(f"{writer.literal(GEMMA_QUOTE)} {content} {writer.literal(GEMMA_QUOTE)}")


GEMMA_QUOTE = '<|"|>'
PYTHON = NotationGrammar(
    _json_string,
    json.dumps,
    *("True", "False", "None"),
    lambda name: f"{json.dumps(name)}: ",
    r'"[A-Za-z0-9_]+": ',
    ", ",
)
GEMMA = NotationGrammar(
    _gemma_string,
    lambda text: f"{GEMMA_QUOTE}{text}{GEMMA_QUOTE}",
    *("true", "false", "null"),
    lambda name: f"{name}:",
    r"[A-Za-z0-9_]+:",
    ",",
)


class LiteralWriter:
    """Writes values in one notation.

    Args:
        writer: collects the rules.
        notation: notation of the values.
    """

    def __init__(self, writer: GrammarWriter, notation: NotationGrammar) -> None:
        self._writer = writer
        self._notation = notation
        self._anything: str | None = None
        self._string: str | None = None

    def value(self, schema: Schema | bool) -> str:
        """Return an expression for a value that is valid by a schema.

        Raises:
            SchemaError: the schema has a keyword that cannot be enforced.
        """
        if schema is True:
            return self.anything()
        if not isinstance(schema, Mapping):
            raise SchemaError("a schema of the parameters allows no value")
        check_keywords(schema, _KEYWORDS)
        if (values := listed_values(schema)) is not None:
            return self._writer.any_of(map(self.literal, values))
        if "anyOf" in schema:
            check_keywords(schema, ("anyOf",))
            return self._writer.any_of(map(self.value, schema["anyOf"]))
        return self._writer.any_of(self._of_type(kind, schema) for kind in _types(schema))

    def literal(self, value: Any) -> str:
        """Return an expression for one value."""
        return self._writer.literal(self._text(value))

    def members(
        self, schema: Schema, key: Callable[[str], str], value: Callable[[Schema | bool], str]
    ) -> str:
        """Return an expression for the properties of an object, in the order of the schema.

        Args:
            schema: schema of the object.
            key: returns the text before the value of a property.
            value: returns an expression for a value by its schema.

        Raises:
            SchemaError: the schema has a keyword that cannot be enforced.
        """
        required = schema.get("required", ())
        entries = [
            (f"{self._writer.literal(key(name))} {value(part)}", name in required)
            for name, part in (properties_of(schema) or {}).items()
        ]
        return self._list_of(entries)

    def anything(self) -> str:
        """Return an expression for any value."""
        if self._anything is None:
            writer = self._writer
            self._anything = writer.later()
            scalars = [
                *(self._of_type(kind, {}) for kind in ("string", "number", "boolean", "null"))
            ]
            item = self._anything
            items = self.repeated(item)
            entries = self.repeated(f"{writer.regex(self._notation.any_key)} {item}")
            array, record = f'"[" {items} "]"', f'"{{" {entries} "}}"'
            writer.define(item, " | ".join([*scalars, array, record]))
        return self._anything

    def repeated(self, item: str) -> str:
        """Return an expression for any number of items with commas between them."""
        comma = self._writer.literal(self._notation.comma)
        return self._writer.rule(f"({item} ({comma} {item})*)?")

    def _of_type(self, kind: str, schema: Schema) -> str:
        writer, notation = self._writer, self._notation
        match kind:
            case "string":
                if self._string is None:
                    self._string = notation.string(writer)
                return self._string
            case "integer":
                return writer.regex(_INTEGER)
            case "number":
                return writer.regex(_NUMBER)
            case "boolean":
                return writer.choice((notation.true, notation.false))
            case "null":
                return writer.choice((notation.null,))
            case "array":
                return f'"[" {self.repeated(self.value(schema.get("items", True)))} "]"'
            case "object" if properties_of(schema) is not None:
                return f'"{{" {self.members(schema, notation.key, self.value)} "}}"'
            case "object":
                entry = f"{writer.regex(notation.any_key)} {self.anything()}"
                return f'"{{" {self.repeated(entry)} "}}"'
            case _:
                raise SchemaError(f"the type {kind} is not known")

    def _list_of(self, entries: Sequence[tuple[str, bool]]) -> str:
        """Return an expression for entries with commas between them, some of them optional."""
        comma = self._writer.literal(self._notation.comma)
        later = '""'  # the entries from here on, after another one
        first = '""'  # the same where there is none before them
        for entry, is_required in reversed(entries):
            beginning = f"{entry} {later}"
            first = beginning if is_required else f"({beginning} | {first})"
            following = f"{comma} {entry}"
            later = f"{following if is_required else f'({following})?'} {later}"
            first, later = self._writer.rule(first), self._writer.rule(later)
        return first

    def _text(self, value: Any) -> str:
        """Return a value as text in this notation."""
        notation = self._notation
        match value:
            case str():
                return notation.quote(value)
            case bool():
                return notation.true if value else notation.false
            case None:
                return notation.null
            case list():
                return f"[{notation.comma.join(map(self._text, value))}]"
            case dict():
                pairs = (f"{notation.key(name)}{self._text(item)}" for name, item in value.items())
                return f"{{{notation.comma.join(pairs)}}}"
            case _:
                return json.dumps(value)


def properties_of(schema: Schema) -> Mapping[str, Any] | None:
    """Return the properties that an object may have; None for any properties.

    Raises:
        SchemaError: the object may have properties that cannot be written.
    """
    properties = schema.get("properties")
    more = schema.get("additionalProperties", True)
    if properties is None and not allows_all(more):
        if more is not False:
            raise SchemaError("the keyword additionalProperties needs properties beside it")
        properties = {}
    for name in schema.get("required", ()):
        if properties is None or name not in properties:
            raise SchemaError(f"the keyword required names {name}, which is not a property")
    return properties


def listed_values(schema: Schema) -> list[Any] | None:
    """Return the values that ``const`` or ``enum`` allows; None without either.

    Raises:
        SchemaError: they are combined with another keyword.
    """
    name = "const" if "const" in schema else "enum"
    if name not in schema:
        return None
    check_keywords(schema, (name, "type"))
    values = [schema["const"]] if name == "const" else schema["enum"]
    allowed = [value for value in values if any(_has_type(value, kind) for kind in _types(schema))]
    if not allowed:
        raise SchemaError(f"the keyword {name} allows no value")
    return allowed


def _types(schema: Schema) -> list[str]:
    kinds = schema.get("type", list(_TYPES))
    return [kinds] if isinstance(kinds, str) else list(kinds)


def _has_type(value: Any, kind: str) -> bool:
    if isinstance(value, bool) or kind == "boolean":
        return isinstance(value, bool) and kind == "boolean"
    return isinstance(value, _PYTHON_TYPES.get(kind, ()))


_PYTHON_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "null": type(None),
    "array": list,
    "object": dict,
}


def check_keywords(schema: Schema, known: Iterable[str]) -> None:
    """Check that a schema has only known keywords.

    Raises:
        SchemaError: naming another one.
    """
    for name in schema:
        if name not in known and name not in ANNOTATIONS | _IDENTIFIERS:
            raise SchemaError(
                f"the keyword {name} is not supported in the format of this model's tool calls"
            )

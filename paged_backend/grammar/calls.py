"""Writes the grammar of tool calls in the format of a model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from paged_backend.grammar.errors import ConstraintError
from paged_backend.grammar.json_schema import checked_schema, parse_schema
from paged_backend.grammar.literals import (
    GEMMA,
    PYTHON,
    LiteralWriter,
    check_keywords,
    listed_values,
    properties_of,
)
from paged_backend.grammar.schema_simplify import simplified
from paged_backend.grammar.schema_walk import SchemaError
from paged_backend.grammar.writer import GrammarWriter
from paged_backend.parsers.formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    GemmaCalls,
    JsonCalls,
    NamedCalls,
    PythonicCalls,
    ToolFormat,
)
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.tool_choice import Tool, ToolChoice

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
# One space at most: models write arguments in one line, compact or not.
_OPTIONS = {"whitespace_pattern": " ?"}


def write_calls(writer: GrammarWriter, constraint: OutputConstraint, content: str | None) -> str:
    """Return an expression for an answer that may have tool calls.

    Args:
        writer: collects the rules.
        constraint: output constraint with a tool choice.
        content: an expression for an answer without calls, if it is constrained, too.

    Raises:
        ConstraintError: the calls of a tool cannot be constrained.
    """
    choice = constraint.tool_choice
    assert choice is not None
    format = TOOL_FORMATS[constraint.tool_parser]
    calls = _CallWriter(writer, format, choice)
    if choice.required:
        return calls.write()
    parser = constraint.reasoning.parser if constraint.reasoning is not None else ""
    begin = REASONING_FORMATS[parser].content_begin if parser else ""
    if content is not None or begin:
        text = f"{writer.literal(begin)} {content or writer.text()}"
        return writer.any_of([calls.write(), text])
    if format.opening:
        return writer.any_of([calls.write(), writer.text(rf"{format.opening}(.|\n)*")])
    marker, bare = format.marker, format.marks.bare
    marks = (marker, bare) if bare else (marker,)
    called = f"{writer.text_until(marker, without=bare)} {calls.write(after=marker)}"
    return writer.any_of([called, writer.text_without(*marks)])


class _CallGrammar(NamedTuple):
    """A call of one tool."""

    head: str  # its text before the arguments
    arguments: str  # an expression
    tail: str  # its text after the arguments


class _CallWriter:
    """Writes calls in one format."""

    def __init__(self, writer: GrammarWriter, format: ToolFormat, choice: ToolChoice) -> None:
        self._writer = writer
        self._format = format
        self._is_parallel = choice.parallel
        self._calls = [self._call(tool) for tool in choice.tools]

    def write(self, after: str = "") -> str:
        """Return an expression for the calls of an answer.

        Args:
            after: text at their beginning that is already there.
        """
        first = self._any((self._format.list_begin + self._format.begin).removeprefix(after))
        more = ""
        if self._is_parallel:
            more = f"({self._any(self._format.separator + self._format.begin)})*"
        return f"{first} {more} {self._writer.literal(self._format.list_end)}"

    def _any(self, begin: str) -> str:
        """Return an expression for one call.

        Its beginning is one literal, because llguidance's lexer decides between it and other text
        at its end.
        """
        literal, end = self._writer.literal, self._format.end
        return self._writer.any_of(
            f"{literal(begin + call.head)} {call.arguments} {literal(call.tail + end)}"
            for call in self._calls
        )

    def _call(self, tool: Tool) -> _CallGrammar:
        schema = _ANY_OBJECT if tool.is_loose else simplified(parse_schema(tool.parameters))
        match self._format.syntax:
            case JsonCalls(key):
                head = f'{{"name": {json.dumps(tool.name)}, {json.dumps(key)}: '
                return _CallGrammar(head, self._json(schema), "}")
            case NamedCalls(middle):
                return _CallGrammar(tool.name + middle, self._json(schema), "")
            case PythonicCalls():
                return _CallGrammar(f"{tool.name}(", self._pythonic(tool, schema), ")")
            case GemmaCalls():
                return _CallGrammar(tool.name, LiteralWriter(self._writer, GEMMA).value(schema), "")
            case _:
                head = f"<function={tool.name}>\n"
                return _CallGrammar(head, self._elements(schema), "</function>")

    def _json(self, schema: Any) -> str:
        return self._writer.json(checked_schema(schema), _OPTIONS)

    def _pythonic(self, tool: Tool, schema: Mapping[str, Any]) -> str:
        if not _IDENTIFIER.fullmatch(tool.name):
            raise ConstraintError(
                f"{tool.origin}.function.name",
                f"must be a name in Python for this model, got {tool.name}",
            )
        return self._keywords(LiteralWriter(self._writer, PYTHON), schema)

    def _keywords(self, literals: LiteralWriter, schema: Mapping[str, Any]) -> str:
        check_keywords(schema, _OF_OBJECTS)
        properties = properties_of(schema)
        if properties is None:
            key = self._writer.regex(r"[A-Za-z_]\w*=")
            return literals.repeated(f"{key} {literals.anything()}")
        for name in properties:
            if not _IDENTIFIER.fullmatch(name):
                raise SchemaError(f"the property {name} is not a name in Python")
        return literals.members(schema, "{}=".format, literals.value)

    def _elements(self, schema: Mapping[str, Any]) -> str:
        check_keywords(schema, _OF_OBJECTS)
        writer, properties = self._writer, properties_of(schema)
        text = writer.text_until(_XML_END)
        if properties is None:
            begin = writer.regex(rf"<parameter={_XML_NAME}>\n")
            return writer.rule(f"({begin} {text})*")
        parts = []
        for name, part in properties.items():
            if not re.fullmatch(_XML_NAME, name):
                raise SchemaError(f"the property {name} has characters that the format cannot hold")
            begin = writer.literal(f"<parameter={name}>\n")
            element = f"{begin} {self._xml_value(part, text)}"
            parts.append(element if name in schema.get("required", ()) else f"({element})?")
        return writer.rule(" ".join(parts) or '""')

    def _xml_value(self, schema: Any, text: str) -> str:
        """Write a string as it is and any other value as JSON, with the end of the element.

        Args:
            schema: schema of the value.
            text: an expression for any string with the end of the element.
        """
        end = self._writer.literal(_XML_END)
        if not isinstance(schema, Mapping):
            raise SchemaError("a schema of the parameters allows no value, or any")
        if "$ref" in json.dumps(schema):  # it would refer to the schema of all parameters
            raise SchemaError("the keyword $ref is not supported in the format of this model")
        if (values := listed_values(schema)) is not None:
            texts = (item if isinstance(item, str) else json.dumps(item) for item in values)
            return f"{self._writer.choice(texts)} {end}"
        if "anyOf" in schema:
            check_keywords(schema, ("anyOf",))
            return self._writer.any_of(self._xml_value(part, text) for part in schema["anyOf"])
        kinds = schema.get("type", "string")
        if isinstance(kinds, list):
            parts = ({**schema, "type": kind} for kind in kinds)
            return self._writer.any_of(self._xml_value(part, text) for part in parts)
        if kinds != "string":
            return f"{self._writer.json(checked_schema(schema), _OPTIONS)} {end}"
        check_keywords(schema, ("type",))
        return text


_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_OF_OBJECTS = ("type", "properties", "required", "additionalProperties")
_XML_NAME = r"[^<>\n\x00-\x1f]+"
_XML_END = "\n</parameter>\n"

"""Translates a constraint into a grammar of llguidance, as text."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING

from llguidance import LLMatcher

from paged_backend.grammar.json_schema import (
    JSON_WHITESPACE,
    STRICT_OPTIONS,
    checked_schema,
    parse_schema,
)
from paged_backend.grammar.lark import to_lark
from paged_backend.grammar.structural_tag import structural_tag_to_grammar
from paged_backend.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:  # a type that only the stub file has
    from llguidance._lib import JsonCompileOptions


def build_grammar(params: StructuredOutputsParams) -> str:
    """Return the grammar of a constraint; its syntax is checked when it is compiled.

    Raises:
        ValueError: the constraint cannot be enforced; the message says why.
    """
    return _BUILDERS[params.kind](params)


def _from_json(params: StructuredOutputsParams) -> str:
    closed = params.disable_additional_properties
    schema = checked_schema(parse_schema(params.content), disable_additional_properties=closed)
    return _from_schema(schema, params)


def _from_json_object(params: StructuredOutputsParams) -> str:
    return _from_schema({"type": "object"}, params)


def _from_schema(schema: object, params: StructuredOutputsParams) -> str:
    options: JsonCompileOptions = {
        **STRICT_OPTIONS,
        "whitespace_flexible": not params.disable_any_whitespace,
    }
    if not params.disable_any_whitespace:
        options["whitespace_pattern"] = params.whitespace_pattern or JSON_WHITESPACE
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _from_regex(params: StructuredOutputsParams) -> str:
    return LLMatcher.grammar_from_regex(params.content)


def _from_choice(params: StructuredOutputsParams) -> str:
    assert params.choice is not None
    literals = (json.dumps(text, ensure_ascii=False) for text in params.choice)
    return LLMatcher.grammar_from_lark(f"start: {' | '.join(literals)}")


def _from_grammar(params: StructuredOutputsParams) -> str:
    return LLMatcher.grammar_from_lark(to_lark(params.content))


def _from_structural_tag(params: StructuredOutputsParams) -> str:
    return structural_tag_to_grammar(params.content)


_BUILDERS: dict[str, Callable[[StructuredOutputsParams], str]] = {
    "json": _from_json,
    "json_object": _from_json_object,
    "regex": _from_regex,
    "choice": _from_choice,
    "grammar": _from_grammar,
    "structural_tag": _from_structural_tag,
}

"""Translates the constraint of a request into a grammar of llguidance, as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paged_backend.grammar.calls import write_calls
from paged_backend.grammar.errors import ConstraintError
from paged_backend.grammar.json_schema import JSON_ON_ONE_LINE, checked_schema, parse_schema
from paged_backend.grammar.lark import to_lark
from paged_backend.grammar.structural_tag import write_structural_tag
from paged_backend.grammar.writer import GrammarWriter
from paged_backend.parsers.formats import REASONING_FORMATS, TOOL_FORMATS
from paged_backend.values.output_constraint import OutputConstraint, Reasoning
from paged_backend.values.structured_outputs import StructuredOutputsParams


def build_grammar(constraint: OutputConstraint, special_token_ids: Mapping[str, int]) -> str:
    """Return the grammar of a constraint; its syntax is checked when it is compiled.

    Args:
        constraint: constraint of a request.
        special_token_ids: the tokens, by their text, that llguidance matches only by their id.

    Raises:
        ValueError: the constraint cannot be enforced; the message says why.
    """
    writer = GrammarWriter(special_token_ids)
    answer = _answer(writer, constraint)
    if constraint.reasoning is not None:
        answer = f"{_reasoning(writer, constraint, constraint.reasoning)} {answer}"
    return writer.grammar(answer)


def _answer(writer: GrammarWriter, constraint: OutputConstraint) -> str:
    """Return an expression for what follows the reasoning."""
    content = None
    if constraint.structured_outputs is not None:
        content = _structured(writer, constraint.structured_outputs)
    if constraint.tool_choice is not None:
        return write_calls(writer, constraint, content)
    parser = constraint.reasoning.parser if constraint.reasoning is not None else ""
    begin = REASONING_FORMATS[parser].content_begin if parser else ""
    return f"{writer.literal(begin)} {content or writer.text()}"


def _reasoning(writer: GrammarWriter, constraint: OutputConstraint, reasoning: Reasoning) -> str:
    """Return an expression for the reasoning, which may be missing unless the prompt begins it.

    It has no mark of calls that would end it, because the grammar of the calls comes after it.
    """
    format = REASONING_FORMATS[reasoning.parser]
    # Only the marks themselves are certain; models differ in the white space around them.
    begin, end = format.begin.rstrip(), format.end.strip()
    limit = "" if reasoning.max_tokens is None else f"[max_tokens={reasoning.max_tokens}]"
    if limit and not writer.is_marked(end):
        raise ConstraintError("thinking_token_budget", f"needs a model with a token for {end}")
    call = ""
    if format.ends_at_calls and constraint.tool_choice is not None:
        call = TOOL_FORMATS[constraint.tool_parser].marks.open
    rest = f"{writer.text_until(end, limit, without=call)} {writer.regex(_SPACE)}"
    if reasoning.is_open:
        may_repeat = format.is_implied and writer.is_marked(begin)  # other text is reasoning
        return f"({writer.literal(begin)})? {rest}" if may_repeat else rest
    return f"({writer.literal(begin)} {rest})?"


def _structured(writer: GrammarWriter, params: StructuredOutputsParams) -> str:
    return _WRITERS[params.kind](writer, params)


def _json(writer: GrammarWriter, params: StructuredOutputsParams) -> str:
    closed = params.disable_additional_properties
    schema = checked_schema(parse_schema(params.content), disable_additional_properties=closed)
    return writer.json(schema, _whitespace(params))


def _json_object(writer: GrammarWriter, params: StructuredOutputsParams) -> str:
    return writer.json({"type": "object"}, _whitespace(params))


def _whitespace(params: StructuredOutputsParams) -> dict[str, Any]:
    if params.disable_any_whitespace:
        return {"whitespace_flexible": False}
    if params.whitespace_pattern is not None:
        return {"whitespace_pattern": params.whitespace_pattern}
    return JSON_ON_ONE_LINE


def _regex(writer: GrammarWriter, params: StructuredOutputsParams) -> str:
    return writer.regex(params.content)


def _choice(writer: GrammarWriter, params: StructuredOutputsParams) -> str:
    assert params.choice is not None
    return writer.choice(params.choice)


def _grammar(writer: GrammarWriter, params: StructuredOutputsParams) -> str:
    return writer.lark(to_lark(params.content))


def _structural_tag(writer: GrammarWriter, params: StructuredOutputsParams) -> str:
    return write_structural_tag(writer, params.content)


_SPACE = r"[ \n]{0,4}"  # after the reasoning
_WRITERS: dict[str, Callable[[GrammarWriter, StructuredOutputsParams], str]] = {
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
}

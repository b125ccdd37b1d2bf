"""Checks that a constraint can be enforced, and makes its grammar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from llguidance import LLTokenizer

from paged_backend.grammar.build import build_grammar
from paged_backend.grammar.errors import ConstraintError
from paged_backend.grammar.matcher import compile_grammar
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.tool_choice import Tool, ToolChoice


def checked_grammar(
    vocabulary: LLTokenizer, special_token_ids: Mapping[str, int], constraint: OutputConstraint
) -> str:
    """Return the grammar of a constraint, which compiles.

    The parameters of a tool that is not strict are replaced by any object if they cannot be
    enforced.

    Args:
        vocabulary: vocabulary of the model.
        special_token_ids: the tokens, by their text, that grammars match only by their id.
        constraint: constraint of a request.

    Raises:
        ConstraintError: a strict tool cannot be enforced, or a tool cannot be called.
        ValueError: another part of the constraint cannot be enforced.
    """

    def compiled(constraint: OutputConstraint) -> str:
        grammar = build_grammar(constraint, special_token_ids)
        compile_grammar(vocabulary, grammar)
        return grammar

    def checked(tool: Tool) -> Tool:
        """Return a tool with parameters that can be enforced."""
        alone = ToolChoice((tool,), required=True)
        try:
            compiled(OutputConstraint(tool_choice=alone, tool_parser=constraint.tool_parser))
        except ConstraintError:
            raise
        except ValueError as error:
            if tool.strict:
                raise ConstraintError(f"{tool.origin}.function.parameters", str(error)) from None
            return replace(tool, is_loose=True)
        return tool

    try:
        return compiled(constraint)
    except ConstraintError:
        raise
    except ValueError:
        choice = constraint.tool_choice
        if choice is None:
            raise
        tools = tuple(map(checked, choice.tools))
        if tools == choice.tools:
            raise
        return compiled(replace(constraint, tool_choice=replace(choice, tools=tools)))

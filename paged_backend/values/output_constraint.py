"""Everything that constrains the tokens of an answer: structured outputs, tools and reasoning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paged_backend.values.errors import InvalidRequest
from paged_backend.values.structured_outputs import StructuredOutputsParams
from paged_backend.values.tool_choice import Tool, ToolChoice


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The reasoning before an answer.

    Attributes:
        parser: the name of its format.
        is_open: the prompt has begun it already. Otherwise the model may begin it or not.
        max_tokens: the number of tokens after which it must end; None for any number.
    """

    parser: str
    is_open: bool = False
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class OutputConstraint:
    """What an answer must look like. It can be hashed, so that its grammar can be cached.

    Attributes:
        structured_outputs: constraint on the text of the answer.
        tool_choice: the calls that the answer may have; None if it has no tools.
        tool_parser: the name of the format of the calls.
        reasoning: what may come before all that.
    """

    structured_outputs: StructuredOutputsParams | None = None
    tool_choice: ToolChoice | None = None
    tool_parser: str = ""
    reasoning: Reasoning | None = None

    def error(self, field: str | None, problem: str) -> InvalidRequest:
        """Return an error about a field, or about the constraint that most likely caused it."""
        if field is not None:
            return InvalidRequest(field, problem)
        if self.structured_outputs is not None:
            return self.structured_outputs.error(problem)
        return InvalidRequest("tools", problem)

    def as_json(self) -> dict[str, Any]:
        """Return the constraint as a JSON value."""
        values = asdict(self)
        if self.structured_outputs is not None:
            values["structured_outputs"] = self.structured_outputs.as_json()
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> OutputConstraint:
        """Build from the result of ``as_json``."""
        structured, choice = values["structured_outputs"], values["tool_choice"]
        reasoning = values["reasoning"]
        return cls(
            None if structured is None else StructuredOutputsParams.of(structured),
            None if choice is None else _choice(choice),
            values["tool_parser"],
            None if reasoning is None else Reasoning(**reasoning),
        )


def _choice(values: Mapping[str, Any]) -> ToolChoice:
    tools = tuple(Tool(**tool) for tool in values["tools"])
    return ToolChoice(tools, required=values["required"], parallel=values["parallel"])

"""What new text adds to an answer: text, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A part of a tool call. The first part has the id and the name.

    Attributes:
        index: index of the call in the answer.
        arguments: new characters of the arguments, which are JSON in the end.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the part in OpenAI's format of a stream."""
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


@dataclass(slots=True)
class ResponseDelta:
    """What new text adds to an answer; joining all deltas gives the whole answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[CallDelta] = field(default_factory=list)

    @classmethod
    def joined(cls, deltas: Iterable[ResponseDelta]) -> Self:
        """Return all deltas as one, in time linear in their length; the parts of a call become
        one part.
        """
        deltas = list(deltas)
        parts = (part for delta in deltas for part in delta.tool_calls)
        return cls(
            "".join(delta.content for delta in deltas),
            "".join(delta.reasoning for delta in deltas),
            [_joined(list(group)) for _, group in groupby(parts, lambda part: part.index)],
        )


def _joined(parts: list[CallDelta]) -> CallDelta:
    first, arguments = parts[0], "".join(part.arguments for part in parts)
    return CallDelta(first.index, arguments, first.id, first.name)

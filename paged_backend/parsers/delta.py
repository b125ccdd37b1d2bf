"""What new text adds to an answer: text, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of a tool call. The first part has the id and the name.

    Attributes:
        index: of the call in the answer.
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
    """What new text adds to an answer; adding all deltas gives the whole answer."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    def __iadd__(self, other: ResponseDelta) -> ResponseDelta:
        """Add what comes next; the parts of a call become one part."""
        self.content += other.content
        self.reasoning += other.reasoning
        for part in other.tool_calls:
            self.add_call(part)
        return self

    def add_call(self, part: ToolCallDelta) -> None:
        """Add a part of a call."""
        if self.tool_calls and self.tool_calls[-1].index == part.index:
            last = self.tool_calls[-1]
            joined = last.arguments + part.arguments
            self.tool_calls[-1] = ToolCallDelta(last.index, joined, last.id, last.name)
        else:
            self.tool_calls.append(part)

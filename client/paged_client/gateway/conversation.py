"""Builds the engine's chat messages from the pieces of other APIs' conversations."""

from __future__ import annotations

from paged_client.gateway.errors import ApiError
from paged_client.gateway.events import Json


class Conversation:
    """Chat messages in the engine's format, in the order in which their pieces are added.

    What the assistant says, thinks and calls between two other turns is one message, as chat
    templates expect.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._called: set[str] = set()

    def system(self, text: str) -> None:
        """Add instructions; those at the beginning are one message."""
        if len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": "system", "content": text})

    def user(self, text: str) -> None:
        """Add a turn of the user."""
        self.messages.append({"role": "user", "content": text})

    def assistant(self, text: str) -> None:
        """Add a text of the assistant."""
        self._extend("content", text)

    def reasoning(self, text: str) -> None:
        """Add reasoning of the assistant."""
        self._extend("reasoning_content", text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of a tool; ``arguments`` is a JSON object as text."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._called.add(call_id)
        self._turn().setdefault("tool_calls", []).append(call)

    def result(self, field: str, call_id: str, text: str) -> None:
        """Add the result of a call. Raises ApiError for ``field`` if there was no such call."""
        if call_id not in self._called:
            raise ApiError.field(field, "belongs to no call before it")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    @property
    def is_open(self) -> bool:
        """True if the last message is a text of the assistant that an answer can go on with."""
        return bool(self.messages) and (
            self.messages[-1]["role"] == "assistant" and "tool_calls" not in self.messages[-1]
        )

    def _turn(self) -> Json:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _extend(self, field: str, text: str) -> None:
        turn = self._turn()
        before = turn.get(field)
        turn[field] = f"{before}\n{text}" if before else text

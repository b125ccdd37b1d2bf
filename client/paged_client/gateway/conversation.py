"""Builds the engine's chat messages from the pieces of other APIs' conversations."""

from __future__ import annotations

from paged_client.gateway.events import Json


class ConversationBuilder:
    """Chat messages in the engine's format, in the order in which their pieces are added.

    The rules are those that every chat template knows: what one side says between two turns of
    others is one message, and only the first message can be of the system.
    """

    def __init__(self) -> None:
        self.messages: list[Json] = []

    def system(self, text: str) -> None:
        """Add instructions; those after the beginning become a part of the user's turn."""
        is_beginning = all(message["role"] == "system" for message in self.messages)
        self._say("system" if is_beginning else "user", text)

    def user(self, text: str) -> None:
        """Add a text of the user."""
        self._say("user", text)

    def assistant(self, text: str) -> None:
        """Add a text of the assistant."""
        self._extend("content", text)

    def reasoning(self, text: str) -> None:
        """Add reasoning of the assistant."""
        self._extend("reasoning_content", text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of a tool; ``arguments`` are JSON as text, or the part that was generated."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """Add the result of a call, which may be missing from a shortened history."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    @property
    def is_open(self) -> bool:
        """True if the last message is a text of the assistant that an answer can go on with."""
        return bool(self.messages) and (
            self.messages[-1]["role"] == "assistant" and "tool_calls" not in self.messages[-1]
        )

    def _say(self, role: str, text: str) -> None:
        if self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += f"\n\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def _turn(self) -> Json:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    def _extend(self, field: str, text: str) -> None:
        turn = self._turn()
        before = turn.get(field)
        turn[field] = f"{before}\n{text}" if before else text

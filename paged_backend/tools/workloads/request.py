"""Requests: workloads create them and every protocol sends them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | tuple[int, ...] | tuple[Message, ...]
"""Text, token ids, or chat messages."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A user message sent after the previous response of a conversation."""

    content: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request and, for a conversation, the later turns.

    ``arrival_s`` is the send time in seconds from the start of the run; None leaves it to the load
    options. ``ignore_eos`` asks for exactly ``max_tokens`` tokens.
    """

    prompt: Prompt
    max_tokens: int
    ignore_eos: bool = True
    arrival_s: float | None = None
    later: tuple[Turn, ...] = ()

    def follow_up(self, answer: str) -> WorkloadRequest | None:
        """Return the next request, with ``answer`` appended to the history; None at the end.

        Raises:
            TypeError: there are later turns, but the prompt is not made of chat messages.
        """
        if not self.later:
            return None
        if not isinstance(self.prompt, tuple) or not isinstance(self.prompt[0], Mapping):
            raise TypeError("only a prompt of chat messages can have later turns")
        turn, *later = self.later
        return replace(
            self,
            prompt=(
                *self.prompt,
                {"role": "assistant", "content": answer},
                {"role": "user", "content": turn.content},
            ),
            max_tokens=turn.max_tokens,
            arrival_s=None,
            later=tuple(later),
        )

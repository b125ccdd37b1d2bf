"""What every workload yields and every protocol sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | tuple[int, ...] | tuple[Message, ...]
"""A text, token ids, or chat messages."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says once the answer before has come."""

    content: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Request:
    """One call, and for a conversation what is said after it.

    ``arrival_s`` is when it is sent, in seconds after the beginning of the run; None where that is
    the load's to decide. ``ignore_eos`` asks for exactly ``max_tokens``.
    """

    prompt: Prompt
    max_tokens: int
    ignore_eos: bool = True
    arrival_s: float | None = None
    later: tuple[Turn, ...] = ()

    def follow_up(self, answer: str) -> Request | None:
        """The next call of the conversation, its history grown by this answer; None at its end.

        Raises:
            TypeError: later turns need a prompt of chat messages.
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

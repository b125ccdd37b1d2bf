"""Collects what readers find in an answer."""

from __future__ import annotations

import uuid

from paged_backend.parsers.delta import CallDelta, ResponseDelta

_SHORT_ID = 16  # characters; templates that demand ids this short take no others than hex digits


class Output:
    """What an answer has so far.

    Args:
        id_length: number of characters of a call's id.
    """

    def __init__(self, id_length: int) -> None:
        self._id_length = id_length
        self._content = _Text()
        self._reasoning = _Text()
        self._new: list[ResponseDelta] = []
        self.num_calls = 0
        self.is_inside_call = False

    def take(self) -> ResponseDelta:
        """Return what is new."""
        new = ResponseDelta.joined(self._new)
        self._new.clear()
        return new

    def content(self, text: str) -> None:
        """Add text of the answer."""
        self._new.append(ResponseDelta(content=self._content.add(text)))

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        self._new.append(ResponseDelta(reasoning=self._reasoning.add(text)))

    def drop(self, text: str) -> None:
        """Add nothing."""

    def begin_part(self) -> None:
        """Drop white space before a part of the answer that is not content, and after it."""
        self._content.leave()
        self._reasoning.leave()

    def end_reasoning(self) -> None:
        """Drop white space at the end of the reasoning."""
        self._reasoning.leave()

    def call(self, name: str) -> None:
        """Begin a call."""
        self.begin_part()
        self.is_inside_call = True
        self._add(CallDelta(self.num_calls, "", self._new_id(), name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add characters of the arguments of the last call."""
        if text:
            self._add(CallDelta(self.num_calls - 1, text))

    def end_call(self) -> None:
        """Note that the last call is complete."""
        self.is_inside_call = False

    def whole_call(self, name: str, arguments: str) -> None:
        """Add a complete call; ``arguments`` is JSON."""
        self.call(name)
        self.arguments(arguments)
        self.end_call()

    def finish(self) -> None:
        """Add white space at the end of the answer."""
        self._new.append(ResponseDelta(content=self._content.finish()))

    def _add(self, part: CallDelta) -> None:
        self._new.append(ResponseDelta(tool_calls=[part]))

    def _new_id(self) -> str:
        number = uuid.uuid4().hex
        return number[: self._id_length] if self._id_length < _SHORT_ID else f"call_{number[:24]}"


class _Text:
    """Text without the white space between it and other parts of the answer."""

    def __init__(self) -> None:
        self._held: list[str] = []  # white space that may be the last
        self._at_start = False

    def add(self, text: str) -> str:
        """Return the text that is certain to belong to the answer."""
        if self._at_start:
            text = text.lstrip()
        certain = text.rstrip()
        if not certain:
            self._held.append(text)
            return ""
        self._at_start = False
        released = "".join((*self._held, certain))
        self._held = [text[len(certain) :]]
        return released

    def leave(self) -> None:
        """Drop white space at the end, and at the beginning of what comes next."""
        self._held = []
        self._at_start = True

    def finish(self) -> str:
        """Return white space at the end of the answer."""
        held = "".join(self._held)
        self._held = []
        return held

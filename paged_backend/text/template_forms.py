"""Finds out in which form a chat template reads the content of messages and the arguments of calls.

Templates of text models take content as a string, other templates (Llama Guard, models of images)
as a list of parts, some either one, depending on the role. A template that gets the wrong form
often prints nothing in its place, without an error. So each form is tried: a short conversation
that no client can choose is rendered, and its text is looked for in the prompt. Only where neither
form appears, the syntax tree decides as in vLLM: a loop over content asks for parts.

This runs in the sandbox process, once for each role, and for requests with and without tools.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from paged_backend.text.call_arguments import render_history
from paged_backend.text.messages import Message
from paged_backend.text.template_syntax import iterates_content
from paged_backend.values.options.chat_template import AUTO_FORMAT, STRING_FORMAT

_FIRST, _SECOND = "zqprobeone", "zqprobetwo"  # texts that no template has
_MAX_LENGTH = 2**20  # characters of a prompt that is searched for them
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ID = "probe0000"  # nine letters and digits, as Mistral's templates ask for
# A tool for the renderings of requests with tools, which may take other branches of a template.
TOOL = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "probe",
        "parameters": {"type": "object", "properties": {}},
    },
}
# Parts that were printed as Python's or JSON's text of them.
_AS_DATA = re.compile(rf"""['"]text['"]\s*:\s*['"]{_FIRST}""")
_ARGUMENT_AS_DATA = f"'{_FIRST}': '{_SECOND}'"


@dataclass(frozen=True, slots=True)
class ContentForm:
    """The forms of content that a template reads in messages of one role.

    Attributes:
        takes_text: it reads a string.
        num_parts: number of parts of a list that it reads, at most 2, which stands for any number.
    """

    takes_text: bool = False
    num_parts: int = 0

    def fit(self, content: str | list[Message]) -> str | list[Message]:
        """Return content in a form that the template reads, as the client gave it if possible."""
        if isinstance(content, str):
            return content if self.takes_text or not self.num_parts else [_part(content)]
        if self.num_parts > 1 or 0 < len(content) <= self.num_parts:
            return content
        text = "\n".join(part["text"] for part in content)  # as in vLLM
        return text if self.takes_text or not self.num_parts else [_part(text)]


_TEXT, _PARTS = ContentForm(takes_text=True), ContentForm(num_parts=2)


class TemplateForms:
    """The forms that one template reads.

    Args:
        source: the template.
        content_format: the option ``chat_template_content_format``.
        render: renders messages with the template, and nothing else that a client chooses; it may
            raise any exception.
    """

    def __init__(
        self, source: str, content_format: str, render: Callable[[list[Message]], str]
    ) -> None:
        self._source = source
        self._format = content_format
        self._render = render
        self._by_role: dict[str, ContentForm | None] = {}

    def fit(self, message: Message) -> Message:
        """Return a message with its content in a form that the template reads.

        Instructions of a developer become the system's if the template does not read that role.
        """
        role = message["role"]
        if role == "developer" and self._found(role) is None:
            message, role = {**message, "role": "system"}, "system"
        if "content" not in message:
            return message
        return {**message, "content": self._form(role).fit(message["content"])}

    def fill(self, message: Message) -> Message:
        """Return a message with an empty content if it has none."""
        return message if "content" in message else self.fit({**message, "content": ""})

    @functools.cached_property
    def takes_text_arguments(self) -> bool:
        """True if the template prints arguments that are objects as Python would."""
        call = _call({_FIRST: _SECOND})
        conversations = [[self._user(), call], [self._user(), call, _result("a"), self._user()]]
        return any(_ARGUMENT_AS_DATA in prompt for prompt in self._prompts(conversations))

    def _form(self, role: str) -> ContentForm:
        """Return the form for a role: the option's, or what was found out."""
        if self._format == STRING_FORMAT:
            return _TEXT
        found = self._found(role) if self._format == AUTO_FORMAT else None
        if found is not None:
            return found
        if role == "tool" or (self._format == AUTO_FORMAT and not self._iterates_content):
            return _TEXT  # as in vLLM, results of tools are texts
        return _PARTS

    @functools.cached_property
    def _iterates_content(self) -> bool:
        return iterates_content(self._source)

    def _found(self, role: str) -> ContentForm | None:
        """Return the form that was found out for a role; None if none appears in a prompt."""
        role = role if role in _ROLES else "user"
        if role not in self._by_role:
            self._by_role[role] = self._find(role)
        return self._by_role[role]

    def _find(self, role: str) -> ContentForm | None:
        takes_text = any(_FIRST in prompt for prompt in self._probe(role, _FIRST))
        num_parts = 0
        for prompt in self._probe(role, [_part(_FIRST), _part(_SECOND)]):
            if _FIRST in prompt and not _AS_DATA.search(prompt):
                num_parts = max(num_parts, 2 if _SECOND in prompt else 1)
        form = ContentForm(takes_text, num_parts)
        return None if form == ContentForm() else form

    def _probe(self, role: str, content: str | list[Message]) -> Iterator[str]:
        """Render sample conversations, one for each role with a message of this content."""
        message = {"role": role, "content": content}
        if role == "user":
            conversations = [[message]]
        elif role == "assistant":
            conversations = [[self._user(), message, self._user()], [self._user(), message]]
        elif role == "tool":
            conversations = [[self._user(), _call({}), _result(content)]]
        else:
            conversations = [[message, self._user()]]
        return self._prompts(conversations)

    def _prompts(self, conversations: list[list[Message]]) -> Iterator[str]:
        for conversation in conversations:
            try:
                prompt = render_history(conversation, self._render, self.fill)
            except MemoryError:
                raise
            except Exception:  # the template does not take this conversation
                continue
            if len(prompt) <= _MAX_LENGTH:
                yield prompt

    def _user(self) -> Message:
        return {"role": "user", "content": self._form("user").fit("a")}


def _part(text: str) -> Message:
    return {"type": "text", "text": text}


def _call(arguments: dict[str, Any]) -> Message:
    function = {"name": "probe", "arguments": arguments}
    call = {"id": _ID, "type": "function", "function": function}
    return {"role": "assistant", "tool_calls": [call]}


def _result(content: str | list[Message]) -> Message:
    return {"role": "tool", "tool_call_id": _ID, "name": "probe", "content": content}

"""Renders conversations as prompts; this runs in the sandbox process."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from paged_backend.text.call_arguments import render_history
from paged_backend.text.messages import Message
from paged_backend.text.template_forms import TOOL, TemplateForms
from paged_backend.values.imports import import_alone, when_used
from paged_backend.values.options.chat_template import AUTO_FORMAT

# All of transformers would take four times as long to import, before the first chat of a server.
# Values of JSON do not need numpy, which would take a third of what is left.
with when_used("numpy"):
    _TEMPLATES = import_alone("transformers.utils.chat_template_utils")
_MAX_FORMS = 32  # templates with remembered forms; a model has two or four


class TemplateRenderer:
    """Renders conversations with `transformers`."""

    def __init__(self) -> None:
        self._forms: dict[str, TemplateForms] = {}

    def render(self, request: dict[str, Any]) -> str:
        """Return the prompt for a request of :class:`paged_backend.text.chat.ChatTemplate`.

        Raises:
            Exception: any that the template raises.
        """
        forms = self._forms_of(request)
        messages = [forms.fit(message) for message in request["messages"]]
        has_calls = any("tool_calls" in message for message in messages)
        options = ("tools", "add_generation_prompt", "continue_final_message")
        render = functools.partial(
            _render,
            request["chat_template"],
            {
                **request.get("constants", {}),
                **request.get("arguments", {}),
                **{name: request[name] for name in options if name in request},
            },
        )
        return render_history(
            messages,
            render,
            fill=forms.fill,
            text_first=has_calls and forms.takes_text_arguments,
        )

    def check(self, source: str) -> str:
        """Return what is wrong with the syntax of a template, and where; empty if nothing is.

        The template is rendered without messages, which many refuse: that is nothing wrong.
        """
        try:
            _render(source, {}, [])
        except TemplateSyntaxError as error:
            return f"{error.message} (line {error.lineno})"
        except Exception:
            return ""
        return ""

    def _forms_of(self, request: dict[str, Any]) -> TemplateForms:
        """Return the forms of the template; of a request they depend on nothing but its tools."""
        source, constants = request["chat_template"], request.get("constants", {})
        content_format = request.get("content_format", AUTO_FORMAT)
        tools = [TOOL] if request.get("tools") else None
        key = json.dumps((source, constants, content_format, tools))
        if key not in self._forms:
            if len(self._forms) >= _MAX_FORMS:
                self._forms.clear()

            arguments = {**constants, "tools": tools, "add_generation_prompt": True}
            render = functools.partial(_render, source, arguments)
            self._forms[key] = TemplateForms(source, content_format, render)
        return self._forms[key]


def _render(source: str, arguments: dict[str, Any], messages: list[Message]) -> str:
    texts: Sequence[str] = _TEMPLATES.render_jinja_template(
        **arguments, chat_template=source, conversations=[messages]
    )[0]
    return texts[0]

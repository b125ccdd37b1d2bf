"""Chat templates: which one is used, and what it gets."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_backend.values.errors import option_error
from paged_backend.values.validation import Rule, checked, shorten

AUTO_FORMAT, STRING_FORMAT, OPENAI_FORMAT = "auto", "string", "openai"
# Arguments of the renderer itself, which no caller can set.
RESERVED_ARGUMENTS = (
    *("messages", "conversations", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
)
_JINJA_CHARACTERS = frozenset("{}\n")  # as vLLM distinguishes a template from a path


@dataclass(frozen=True, kw_only=True)
class ChatTemplateOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    chat_template: str | None = checked(
        None,
        Rule(str, optional=True),
        "file with a Jinja template, the template itself, or the name of one of the model's "
        "templates, which then renders all chats; default: the model's template, and for requests "
        "with tools its template tool_use if it has one",
    )
    chat_template_content_format: str = checked(
        AUTO_FORMAT,
        Rule(str, choices=(AUTO_FORMAT, STRING_FORMAT, OPENAI_FORMAT)),
        "content of messages as the chat template gets it: string is one text, openai is a list of "
        "parts; auto: for each role what the template can read",
    )
    default_chat_template_kwargs: dict[str, Any] | None = checked(
        None,
        Rule(dict, optional=True),
        "arguments of the chat template as JSON, such as enable_thinking; chat_template_kwargs of "
        "a request take precedence",
    )

    def check_chat_template(self) -> None:
        """Refuse a file that does not exist and arguments that are the renderer's own.

        Raises:
            ConfigError: naming the option.
        """
        name = "chat_template"
        if self.chat_template == "":
            raise option_error(name, "must be a file, a template or a name, got ''")
        if is_path(self.chat_template) and not Path(str(self.chat_template)).is_file():
            raise option_error(name, f"names no file: {shorten(self.chat_template, 200)}")
        name, arguments = "default_chat_template_kwargs", self.default_chat_template_kwargs or {}
        for argument in RESERVED_ARGUMENTS:
            if argument in arguments:
                raise option_error(name, f"must not hold {argument}")
        try:
            json.dumps(arguments)
        except (TypeError, ValueError) as error:
            raise option_error(name, f"must be a JSON object: {error}") from error


def is_template_text(chat_template: str) -> bool:
    """Return True for a Jinja template, False for a path or a name."""
    return not _JINJA_CHARACTERS.isdisjoint(chat_template)


def is_path(chat_template: str | None) -> bool:
    """Return True for a path; the names of a model's templates have no slash and no suffix."""
    if chat_template is None or is_template_text(chat_template):
        return False
    return "/" in chat_template or Path(chat_template).suffix != ""


def resolved_path(chat_template: str, folder: Path) -> str:
    """Return an absolute path for a file that is relative to ``folder``, other values unchanged."""
    if is_template_text(chat_template):
        return chat_template
    path = folder / Path(chat_template).expanduser()
    return str(path.resolve()) if path.is_file() else chat_template

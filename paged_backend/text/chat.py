"""Renders chat messages as the text of a prompt, with the chat template of a model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged_backend.text.messages import read_messages
from paged_backend.text.template_client import TemplateClient
from paged_backend.text.template_files import (
    DEFAULT,
    TOOL_USE,
    read_template,
)
from paged_backend.text.template_syntax import takes_argument
from paged_backend.values.errors import InvalidRequest, RequestRefused, option_error
from paged_backend.values.log import LOG
from paged_backend.values.options.chat_template import (
    RESERVED_ARGUMENTS,
    ChatTemplateOptions,
    is_template_text,
)
from paged_backend.values.validation import Rule, check_fields, checked, from_mapping, shorten

_PREPARE_AFTER_S = 1.0  # when the server has finished loading
# Arguments of chat templates that turn reasoning on and off.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_DOCUMENTS = 1024
_LITTLE_EFFORT = ("none", "minimal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A conversation with its rendering options, checked when made; names are vLLM's.

    Raises:
        InvalidRequest: naming the field and what it accepts.
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    add_generation_prompt: bool | None = checked(
        None, Rule(bool, optional=True), "begin the assistant's turn; default: unless one goes on"
    )
    continue_final_message: bool = checked(
        False, Rule(bool), "leave the last message open, so that the answer goes on with it"
    )
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    reasoning_effort: str | None = checked(
        None, Rule(str, choices=EFFORTS, optional=True), "how much the model should reason"
    )
    documents: list[dict[str, Any]] | None = None  # that a template puts into the prompt

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", read_messages(self.messages))
        check_fields(self, InvalidRequest)
        if self.add_generation_prompt is None:
            object.__setattr__(self, "add_generation_prompt", not self.continue_final_message)
        elif self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt", "must be false where continue_final_message is true"
            )
        if not isinstance(self.chat_template_kwargs, dict):
            raise InvalidRequest("chat_template_kwargs", "must be an object")
        _check_documents(self.documents)
        for name in RESERVED_ARGUMENTS:
            if name in self.chat_template_kwargs:
                raise InvalidRequest("chat_template_kwargs", f"must not hold {name}")

    @classmethod
    def from_json(cls, value: object) -> Chat:
        """Build from the JSON of a client: an array of messages, or an object with these fields.

        Raises:
            InvalidRequest: naming the field and what it accepts.
        """
        if isinstance(value, Mapping):
            return from_mapping(cls, value, InvalidRequest)
        return cls(messages=value)  # type: ignore[arg-type]  # checked when made


class ChatTemplate:
    """A model's chat templates, rendered in transformers' sandbox in a separate process.

    Args:
        templates: Jinja templates by name, or the only one.
        special_tokens: tokens that the templates can refer to, such as ``bos_token``.
        options: options of the model; the default is its own templates.
    """

    def __init__(
        self,
        templates: str | Mapping[str, str],
        special_tokens: Mapping[str, str],
        options: ChatTemplateOptions | None = None,
    ) -> None:
        options = options or ChatTemplateOptions()
        self._templates = {DEFAULT: templates} if isinstance(templates, str) else dict(templates)
        self._content_format = options.chat_template_content_format
        self._constants = {**special_tokens, **(options.default_chat_template_kwargs or {})}
        self._client = TemplateClient()

    def prepare(self) -> None:
        """Start the process soon, because otherwise the first prompt takes a second longer.

        A warning is logged for a template with a wrong syntax: requests without chats need none.
        """
        timer = threading.Timer(_PREPARE_AFTER_S, self._warn_of_problems)
        timer.daemon = True
        timer.start()

    def check_option(self) -> None:
        """Check the syntax of the templates, which an option has chosen.

        Raises:
            ConfigError: one cannot be used.
        """
        for problem in self._problems():
            raise option_error("chat_template", f"names a template that cannot be used: {problem}")
        self._client.close()  # it may be long until a chat

    def _warn_of_problems(self) -> None:
        with contextlib.suppress(RequestRefused):  # the first chat tries again
            for problem in self._problems():
                LOG.warning("a chat template of the model cannot be used: %s", problem)

    def _problems(self) -> Iterator[str]:
        """Yield what is wrong with the syntax of each template, as its process finds."""
        for name, source in self._templates.items():
            problem = self._client.syntax_problem(source)
            if problem:
                yield f"{shorten(name, quote=False)}: {problem}"

    @property
    def source(self) -> str:
        """The text of all templates, which shows in which formats the model answers."""
        return "\n".join(self._templates.values())

    def render(self, chat: Chat, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of the prompt, special tokens included.

        The template is chosen as in `transformers`: ``tool_use`` if there are tools and a template
        with this name, otherwise ``default``.

        Args:
            chat: the conversation.
            tools: tools that the model may call, as OpenAI's JSON.

        Raises:
            InvalidRequest: the template refuses these messages, or takes too long or too much; or
                it knows no tools, documents or reasoning effort, and the request has them; or
                there are several templates and no default.
        """
        source = self._choose(has_tools=bool(tools))
        if tools and not takes_argument(source, "tools"):
            raise InvalidRequest("tools", "cannot be used: the model's chat template takes none")
        if chat.documents and not takes_argument(source, "documents"):
            raise InvalidRequest(
                "documents", "cannot be used: the model's chat template takes none"
            )
        return self._client.render(
            {
                "chat_template": source,
                "content_format": self._content_format,
                "constants": self._constants,
                "arguments": {
                    **_effort(source, chat.reasoning_effort),
                    **chat.chat_template_kwargs,
                    **({"documents": chat.documents} if chat.documents else {}),
                },
                "messages": chat.messages,
                "tools": list(tools) or None,
                "add_generation_prompt": bool(chat.add_generation_prompt),
                "continue_final_message": chat.continue_final_message,
            }
        )

    def _choose(self, *, has_tools: bool) -> str:
        if has_tools and TOOL_USE in self._templates:
            return self._templates[TOOL_USE]
        if DEFAULT not in self._templates:
            raise InvalidRequest(
                "messages",
                "cannot be used: none of the model's chat templates is its default; the option "
                f"chat_template can name one of {_listed(self._templates)}",
            )
        return self._templates[DEFAULT]


def choose_chat_template(
    templates: Mapping[str, str],
    special_tokens: Mapping[str, str],
    options: ChatTemplateOptions | None = None,
) -> ChatTemplate | None:
    """Return a model's chat templates, or the one that an option selects; None if it has none.

    Raises:
        ConfigError: a file cannot be read, or the option selects a template
            that does not exist or has a wrong syntax.
    """
    named = None if options is None else options.chat_template
    if named is not None:
        templates = {DEFAULT: _named_template(named, templates)}
    template = ChatTemplate(templates, special_tokens, options) if templates else None
    if template is not None and named is not None:
        template.check_option()
    return template


def _named_template(named: str, templates: Mapping[str, str]) -> str:
    if is_template_text(named):
        return named
    if Path(named).is_file():
        return read_template(Path(named))
    if named not in templates:
        known = f": {_listed(templates)}" if templates else ", which has none"
        raise option_error(
            "chat_template",
            f"must be a file, a Jinja template or the name of one of the model's templates{known}, "
            f"got {shorten(named, 200)}",
        )
    return templates[named]


def _check_documents(documents: object) -> None:
    if documents is None:
        return
    if not isinstance(documents, list) or not all(isinstance(item, dict) for item in documents):
        raise InvalidRequest("documents", f"must be an array of objects, got {shorten(documents)}")
    if len(documents) > MAX_DOCUMENTS:
        raise InvalidRequest("documents", f"at most {MAX_DOCUMENTS}, got {len(documents)}")


def _effort(source: str, effort: str | None) -> dict[str, Any]:
    """Return the template's arguments for a reasoning effort: the effort itself, and its switches.

    A template that takes both would go on to reason at the effort ``none`` without its switch.
    """
    if effort is None:
        return {}
    values: dict[str, Any] = dict.fromkeys(_THINKING_SWITCHES, effort not in _LITTLE_EFFORT)
    values["reasoning_effort"] = effort
    taken = {name: value for name, value in values.items() if takes_argument(source, name)}
    if not taken and effort != "none":
        raise InvalidRequest(
            "reasoning_effort", "can only be none: the model's chat template knows no other"
        )
    return taken


def _listed(names: Iterable[str]) -> str:
    return shorten(", ".join(sorted(names)), 200, quote=False)

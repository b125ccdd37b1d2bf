"""Renders chat messages as the text of a prompt, with the chat template of a model."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged_backend.errors import ConfigError, InvalidRequest
from paged_backend.json_file import read_json_object
from paged_backend.text.template_client import TemplateClient
from paged_backend.validation import Rule, check_fields, checked, from_mapping, shorten

MAX_MESSAGES = 4096
_PREPARE_AFTER_S = 1.0  # when the server has finished loading
_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"
_RESERVED = (
    *("messages", "conversations", "tools", "documents", "chat_template"),
    *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
)
_TOOL_FIELDS = ("tool_calls", "function_call")


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", _messages(self.messages))
        check_fields(self, InvalidRequest)
        if self.add_generation_prompt is None:
            object.__setattr__(self, "add_generation_prompt", not self.continue_final_message)
        elif self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequest(
                "add_generation_prompt", "must be false where continue_final_message is true"
            )
        if not isinstance(self.chat_template_kwargs, dict):
            raise InvalidRequest("chat_template_kwargs", "must be an object")
        for name in _RESERVED:
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
    """A model's chat template, rendered in transformers' sandbox in a separate process.

    Args:
        source: the Jinja template.
        special_tokens: tokens that the template can refer to, such as ``bos_token``.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._client = TemplateClient()

    def prepare(self) -> None:
        """Start the process soon, because otherwise the first prompt takes a second longer."""
        timer = threading.Timer(_PREPARE_AFTER_S, self._client.start)
        timer.daemon = True
        timer.start()

    def render(self, chat: Chat) -> str:
        """Return the text of the prompt, special tokens included.

        Raises:
            InvalidRequest: the template refuses these messages, or takes too long or too much.
        """
        return self._client.render(
            {
                **self._special_tokens,
                **chat.chat_template_kwargs,
                "conversations": [chat.messages],
                "chat_template": self._source,
                "add_generation_prompt": bool(chat.add_generation_prompt),
                "continue_final_message": chat.continue_final_message,
            }
        )


def load_chat_template(folder: Path) -> ChatTemplate | None:
    """Load the chat template of a checkpoint, from its own file or ``tokenizer_config.json``.

    Raises:
        ConfigError: the folder's files cannot be read.
    """
    config = read_json_object(folder / _CONFIG_FILE) if (folder / _CONFIG_FILE).exists() else {}
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        by_name = {entry.get("name"): entry.get("template") for entry in source}
        source = by_name.get("default")
    if (folder / _TEMPLATE_FILE).exists():
        try:
            source = (folder / _TEMPLATE_FILE).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot read {folder / _TEMPLATE_FILE}: {error}") from error
    if not isinstance(source, str):
        return None
    tokens = {
        name: token_content(value) for name, value in config.items() if name.endswith("_token")
    }
    return ChatTemplate(source, {name: token for name, token in tokens.items() if token})


def token_content(token: object) -> str | None:
    """Return the text of a token that a file stores as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages", f"must be an array of messages, got {shorten(value)}")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"at most {MAX_MESSAGES}, got {len(value)}")
    return [_message(index, message) for index, message in enumerate(value)]


def _message(index: int, message: object) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(name, f"must be an object, got {shorten(message)}")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(
            f"{name}.role", f"must be a string, got {shorten(message.get('role'))}"
        )
    for tool_field in _TOOL_FIELDS:
        if message.get(tool_field) is not None:
            raise InvalidRequest(f"{name}.{tool_field}", "is not supported yet")
    return {**message, "content": _text(f"{name}.content", message.get("content"))}


def _text(name: str, content: object) -> str:
    """Return the text of a message; its parts are joined by line breaks, as in vLLM."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(name, f"must be a string or a list of parts, got {shorten(content)}")
    return "\n".join(_part(f"{name}[{index}]", part) for index, part in enumerate(content))


def _part(name: str, part: object) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or part.get("type") != "text":
        kind = part.get("type") if isinstance(part, dict) else part
        raise InvalidRequest(name, f"must be of type text, got {shorten(kind)}")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{name}.text", "must be a string")
    return str(part["text"])

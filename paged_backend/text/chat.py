"""Renders chat messages as the text of a prompt, with the chat template of a model."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paged_backend.errors import InvalidRequest
from paged_backend.json_file import MAX_JSON_BYTES, read_json_object
from paged_backend.regular_file import read_text
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
# Arguments of chat templates that turn reasoning on and off.
_THINKING_SWITCHES = ("enable_thinking", "thinking")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
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

    @property
    def source(self) -> str:
        """The Jinja template."""
        return self._source

    def takes(self, name: str) -> bool:
        """Return True if the template uses an argument."""
        return re.search(rf"\b{name}\b", self._source) is not None

    def render(self, chat: Chat, tools: Sequence[Mapping[str, Any]] = ()) -> str:
        """Return the text of the prompt, special tokens included.

        Args:
            chat: the conversation.
            tools: that the model may call, as OpenAI's JSON.

        Raises:
            InvalidRequest: the template refuses these messages, or takes too long or too much; or
                it knows no tools or no reasoning effort, and the request has them.
        """
        if tools and not self.takes("tools"):
            raise InvalidRequest("tools", "cannot be used: the model's chat template takes none")
        try:
            return self._render(chat, chat.messages, tools)
        except InvalidRequest:
            # Most templates take the arguments of calls as objects, some as text.
            if not any(message.get("tool_calls") for message in chat.messages):
                raise
            try:
                return self._render(chat, _with_text_arguments(chat.messages), tools)
            except InvalidRequest:
                pass
            raise

    def _render(
        self, chat: Chat, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> str:
        return self._client.render(
            {
                **self._special_tokens,
                **self._effort(chat.reasoning_effort),
                **chat.chat_template_kwargs,
                "tools": list(tools) or None,
                "conversations": [messages],
                "chat_template": self._source,
                "add_generation_prompt": bool(chat.add_generation_prompt),
                "continue_final_message": chat.continue_final_message,
            }
        )

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """Return the template's argument for a reasoning effort."""
        if effort is None:
            return {}
        if self.takes("reasoning_effort"):
            return {"reasoning_effort": effort}
        for switch in _THINKING_SWITCHES:
            if self.takes(switch):
                return {switch: effort not in _LITTLE_EFFORT}
        if effort == "none":
            return {}
        raise InvalidRequest(
            "reasoning_effort", "can only be none: the model's chat template knows no other"
        )


def load_chat_template(
    folder: Path, special_tokens: Mapping[str, str] | None = None
) -> ChatTemplate | None:
    """Load the chat template of a checkpoint, from its own file or ``tokenizer_config.json``.

    Args:
        folder: of the checkpoint.
        special_tokens: of its tokenizer, by names such as ``bos_token``; default: those that
            ``tokenizer_config.json`` names.

    Raises:
        ConfigError: the folder's files cannot be read.
    """
    config = read_json_object(folder / _CONFIG_FILE) if (folder / _CONFIG_FILE).exists() else {}
    source = config.get("chat_template")
    if isinstance(source, list):  # several by name
        by_name = {entry.get("name"): entry.get("template") for entry in source}
        source = by_name.get("default")
    if (folder / _TEMPLATE_FILE).exists():
        source = read_text(folder / _TEMPLATE_FILE, MAX_JSON_BYTES)
    if not isinstance(source, str):
        return None
    if special_tokens is not None:
        return ChatTemplate(source, special_tokens)
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
    messages = [_message(index, message) for index, message in enumerate(value)]
    _check_results(messages)
    return messages


def _message(index: int, message: object) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, dict):
        raise InvalidRequest(name, f"must be an object, got {shorten(message)}")
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(
            f"{name}.role", f"must be a string, got {shorten(message.get('role'))}"
        )
    if message.get("function_call") is not None:
        raise InvalidRequest(f"{name}.function_call", "is not supported; use tool_calls")
    content = message.get("content")
    if message.get("tool_calls") is not None:
        calls = _tool_calls(f"{name}.tool_calls", message["tool_calls"])
        text = "" if content is None else _text(f"{name}.content", content)
        message = {**message, "content": text, "tool_calls": calls}
    else:
        message = {**message, "content": _text(f"{name}.content", content)}
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if reasoning is None:
        return message
    if not isinstance(reasoning, str):
        raise InvalidRequest(f"{name}.reasoning_content", "must be a string")
    return {**message, "reasoning_content": reasoning}


def _tool_calls(name: str, calls: object) -> list[dict[str, Any]]:
    """Return the calls of a message, their arguments as objects, as chat templates expect them."""
    if not isinstance(calls, list):
        raise InvalidRequest(name, f"must be a list, got {shorten(calls)}")
    return [_tool_call(f"{name}[{index}]", call) for index, call in enumerate(calls)]


def _tool_call(name: str, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict):
        raise InvalidRequest(name, "must be an object with a function")
    if not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{name}.function.name", "must be a string")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{name}.function.arguments", "must be a JSON object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _with_text_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the arguments of their calls as JSON text."""
    return [
        {**message, "tool_calls": list(map(_text_arguments, message["tool_calls"]))}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def _check_results(messages: list[dict[str, Any]]) -> None:
    """Check that each result of a tool belongs to a call."""
    called: set[object] = set()
    for index, message in enumerate(messages):
        called.update(call.get("id") for call in message.get("tool_calls") or ())
        if message["role"] == "tool" and message.get("tool_call_id") not in called:
            raise InvalidRequest(
                f"messages[{index}].tool_call_id",
                f"belongs to no call before it: {shorten(message.get('tool_call_id'))}",
            )


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

"""The tools that a request offers to the model, and the calls that it allows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paged_backend.values.errors import InvalidRequest
from paged_backend.values.validation import shorten

MAX_TOOLS = 512
MAX_SCHEMA_LENGTH = 2**17  # characters of all parameters together
MODES = ("none", "auto", "required")
NAME_PATTERN = r"[A-Za-z0-9_.-]{1,128}"

_NAME = re.compile(NAME_PATTERN)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model can call.

    Attributes:
        name: name of the function.
        parameters: JSON schema of its arguments, as JSON text.
        strict: the request is refused if the schema cannot be enforced.
        origin: the client's name for the tool, for errors.
        is_loose: any object will do for the arguments, as their schema cannot be enforced.
    """

    name: str
    parameters: str
    strict: bool = False
    origin: str = "tools"
    is_loose: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The calls that an answer may consist of.

    Attributes:
        tools: those that may be called; empty if none may.
        required: the answer consists of calls.
        parallel: it may have several calls.
    """

    tools: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True


def read_tools(value: object) -> tuple[Tool, ...]:
    """Read OpenAI's ``tools``.

    Raises:
        InvalidRequest: naming the tool and what is wrong with it.
    """
    if not isinstance(value, list):
        raise InvalidRequest("tools", f"must be a list of tools, got {shorten(value)}")
    if len(value) > MAX_TOOLS:
        raise InvalidRequest("tools", f"at most {MAX_TOOLS}, got {len(value)}")
    tools = tuple(_tool(f"tools[{index}]", item) for index, item in enumerate(value))
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise InvalidRequest(f"{tool.origin}.function.name", f"{tool.name} is there twice")
        seen.add(tool.name)
    if sum(len(tool.parameters) for tool in tools) > MAX_SCHEMA_LENGTH:
        raise InvalidRequest(
            "tools", f"the parameters have over {MAX_SCHEMA_LENGTH} characters together"
        )
    return tools


def read_tool_choice(tools: Sequence[Tool], choice: object, *, parallel: bool) -> ToolChoice:
    """Read OpenAI's ``tool_choice``.

    Args:
        tools: the tools of the request.
        choice: a mode, an object that names a function or the allowed tools, or None for ``auto``.
        parallel: whether an answer may have several calls.

    Raises:
        InvalidRequest: the choice is unknown, or names a tool that the request does not have.
    """
    name = "tool_choice"
    if choice is None:
        choice = "auto"
    if isinstance(choice, str):
        return _by_mode(name, tools, choice, parallel=parallel)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        assert isinstance(choice, Mapping)
        called = _named(name, tools, choice)
        return ToolChoice((called,), required=True, parallel=False)
    if kind == "allowed_tools":
        assert isinstance(choice, Mapping)
        return _allowed(f"{name}.allowed_tools", tools, choice, parallel=parallel)
    raise InvalidRequest(
        name,
        f"must be {', '.join(MODES)}, or an object of type function or allowed_tools, got "
        + shorten(choice),
    )


def _tool(origin: str, value: object) -> Tool:
    if not isinstance(value, Mapping):
        raise InvalidRequest(origin, f"must be an object, got {shorten(value)}")
    if value.get("type") != "function":
        raise InvalidRequest(
            f"{origin}.type", f"must be function, got {shorten(value.get('type'))}"
        )
    function = value.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequest(f"{origin}.function", f"must be an object, got {shorten(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{origin}.function.name",
            "must have 1 to 128 letters, digits, '_', '.' and '-', got " + shorten(name),
        )
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{origin}.function.description", "must be a string")
    strict = function.get("strict") or False
    if not isinstance(strict, bool):
        raise InvalidRequest(f"{origin}.function.strict", "must be true or false")
    return Tool(name, _schema(origin, function.get("parameters")), strict, origin)


def _schema(origin: str, parameters: object) -> str:
    """Return the schema of a tool's arguments; without one, any object will do."""
    if parameters is None:
        parameters = {}
    if not isinstance(parameters, Mapping):
        raise InvalidRequest(
            f"{origin}.function.parameters", f"must be a JSON schema, got {shorten(parameters)}"
        )
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{origin}.function.parameters.type",
            f"must be object, got {shorten(parameters['type'])}",
        )
    return json.dumps({**parameters, "type": "object"})


def _by_mode(name: str, tools: Sequence[Tool], mode: str, *, parallel: bool) -> ToolChoice:
    if mode not in MODES:
        raise InvalidRequest(name, f"must be one of {', '.join(MODES)}, got {shorten(mode)}")
    if mode == "none":
        return ToolChoice()
    if mode == "required" and not tools:
        raise InvalidRequest(name, "required needs tools")
    return ToolChoice(tuple(tools), required=mode == "required", parallel=parallel)


def _named(name: str, tools: Sequence[Tool], value: object) -> Tool:
    function = value.get("function") if isinstance(value, Mapping) else None
    wanted = function.get("name") if isinstance(function, Mapping) else None
    for tool in tools:
        if tool.name == wanted:
            return tool
    raise InvalidRequest(
        f"{name}.function.name", f"names no tool of the request: {shorten(wanted)}"
    )


def _allowed(
    name: str, tools: Sequence[Tool], choice: Mapping[str, Any], *, parallel: bool
) -> ToolChoice:
    allowed = choice.get("allowed_tools")
    if not isinstance(allowed, Mapping) or not isinstance(allowed.get("tools"), list):
        raise InvalidRequest(name, "must be an object with mode and tools")
    mode = allowed.get("mode")
    if mode not in ("auto", "required"):
        raise InvalidRequest(f"{name}.mode", f"must be auto or required, got {shorten(mode)}")
    chosen = {
        _named(f"{name}.tools[{index}]", tools, item): None
        for index, item in enumerate(allowed["tools"])
    }
    if not chosen:
        raise InvalidRequest(f"{name}.tools", "must not be empty")
    return ToolChoice(tuple(chosen), required=mode == "required", parallel=parallel)

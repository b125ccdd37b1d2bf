"""Constraints, tools and histories that must be refused, in the form of each interface."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tool_models import LOOKUP, MESSAGES, NOW, TOOLS

MODEL = "paged_llm"
Fields = dict[str, Any]


def _function(**fields: Any) -> Fields:
    return {"type": "function", "function": {"name": "f", **fields}}


def _strict(parameters: Fields) -> Fields:
    return {"tools": [NOW, _function(parameters=parameters, strict=True)]}


def _nested(levels: int) -> Fields:
    schema: Fields = {}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@dataclass(frozen=True)
class Bad:
    """A request that must be refused.

    Attributes:
        fields: request fields in the names of chats and of vLLM.
        named: what the error must name, apart from the interface's name of the field.
    """

    fields: Fields
    named: str = ""

    @property
    def constraint(self) -> Fields | None:
        """The constraint; None if something else is wrong."""
        found: Fields | None = self.fields.get("structured_outputs")
        return found


_ENDLESS = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]}
    },
}
# All are values of ``structured_outputs``.
CONSTRAINTS: dict[str, Bad] = {
    name: Bad({"structured_outputs": constraint}, named)
    for name, (constraint, named) in {
        "no JSON": ({"json": "{"}, ""),
        "unsupported keyword": ({"json": {"type": "object", "not": {}}}, "not"),
        "endless reference": ({"json": {"$ref": "#"}}, ""),
        "endless recursion": ({"json": _ENDLESS}, ""),
        "remote reference": ({"json": {"$ref": "http://127.0.0.1:9/schema"}}, "$ref"),
        "deep schema": ({"json": _nested(150)}, "nested"),
        "deep text": ({"json": "[" * 50_000}, "nested"),
        "minItems": ({"json": {"type": "array", "minItems": 2**63}}, "minItems"),
        "invalid regex": ({"regex": "(a"}, ""),
        "look-ahead": ({"regex": "(?=a)b"}, ""),
        "deep regex": ({"regex": "(" * 500 + ")" * 500}, ""),
        "undefined rule": ({"grammar": "root ::= missing"}, ""),
        "10,000 choices": ({"choice": [f"choice {index}" for index in range(10_000)]}, ""),
    }.items()
}
TOOL_USE: dict[str, Bad] = {
    "tool without a name": Bad({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
    "two tools of a name": Bad({"tools": [NOW, NOW]}, "tools[1]"),
    "tool with a bad keyword": Bad(_strict({"not": {}}), "not"),
    "tool with an endless schema": Bad(_strict({"$ref": "#"}), "tools[1]"),
    "tool with minItems": Bad(
        _strict({"properties": {"a": {"type": "array", "minItems": 2**63}}}), "minItems"
    ),
    "tool with long parameters": Bad(
        {"tools": [_function(parameters={"description": "x" * 140_000})]}, "tools"
    ),
    "600 tools": Bad({"tools": [_function(name=f"f{index}") for index in range(600)]}, "tools"),
    "choice of an unknown tool": Bad(
        {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "lookup"}}},
        "tool_choice",
    ),
    "choice without tools": Bad({"tool_choice": "required"}, "tool_choice"),
}
BAD = CONSTRAINTS | TOOL_USE


@dataclass(frozen=True)
class Request:
    """A request by HTTP; its error must have the text ``named``."""

    path: str
    body: Fields
    named: str


def _as_text(fields: Fields) -> Fields:
    """Return fields as Triton's JSON holds them, where objects and lists are texts."""
    return {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in fields.items()
    }


def _generate(model: str) -> Callable[[Bad], Request]:
    def make(bad: Bad) -> Request:
        fields = _as_text(bad.fields | {"messages": MESSAGES})
        named = bad.named or "structured_outputs"
        return Request(f"/v2/models/{model}/generate", fields, named)

    return make


def _chat(bad: Bad) -> Request:
    body = {"messages": MESSAGES, **bad.fields}
    return Request("/v1/chat/completions", body, bad.named or "structured_outputs")


def _response_format(bad: Bad) -> Request | None:
    schema = (bad.constraint or {}).get("json")
    if not isinstance(schema, dict):
        return None
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"messages": MESSAGES, "response_format": form}
    return Request("/v1/chat/completions", body, bad.named or "response_format")


def _completion(bad: Bad) -> Request | None:
    if bad.constraint is None:
        return None
    named = bad.named or "structured_outputs"
    return Request("/v1/completions", {"prompt": "x", **bad.fields}, named)


def _response(bad: Bad) -> Request:
    body: Fields = {"input": MESSAGES, **bad.fields}
    if "tools" in body:
        body["tools"] = [{"type": "function", **tool["function"]} for tool in body["tools"]]
    if isinstance(body.get("tool_choice"), dict):
        body["tool_choice"] = {"type": "function", "name": "lookup"}
    schema = (bad.constraint or {}).get("json")
    if isinstance(schema, dict):
        del body["structured_outputs"]
        body["text"] = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
        return Request("/v1/responses", body, bad.named or "text.format")
    named = bad.named.replace("messages", "input") or "structured_outputs"
    return Request("/v1/responses", body, named)


def _message(bad: Bad) -> Request:
    body: Fields = {
        "messages": MESSAGES,
        "max_tokens": 100,
        **bad.fields,
    }
    if "tools" in body:
        body["tools"] = [_described(tool["function"]) for tool in body["tools"]]
    if body.get("tool_choice") == "required":
        body["tool_choice"] = {"type": "any"}
    elif "tool_choice" in body:
        body["tool_choice"] = {"type": "tool", "name": "lookup"}
    schema = (bad.constraint or {}).get("json")
    if isinstance(schema, dict):
        del body["structured_outputs"]
        body["output_config"] = {"format": {"type": "json_schema", "schema": schema}}
        return Request("/v1/messages", body, bad.named or "output_config.format")
    return Request("/v1/messages", body, bad.named or "structured_outputs")


def _described(function: Fields) -> Fields:
    rest = {name: value for name, value in function.items() if name != "parameters"}
    return {**rest, "input_schema": function.get("parameters", {"type": "object"})}


def _ensemble(bad: Bad) -> Request | None:
    kinds = {"json": "json_schema", "regex": "regex", "grammar": "ebnf_grammar"}
    for kind, value in (bad.constraint or {}).items():
        if kind in kinds:
            guide = value if isinstance(value, str) else json.dumps(value)
            fields = {
                "text_input": "x",
                "max_tokens": 5,
                "guided_decoding_guide_type": kinds[kind],
                "guided_decoding_guide": guide,
            }
            named = bad.named or "guided_decoding_guide"
            return Request("/v2/models/ensemble/generate", fields, named)
    return None


# Interfaces of the server, and of the gateway. A form is None where an interface has no such field.
TRITON: dict[str, Callable[[Bad], Request | None]] = {
    "generate": _generate(MODEL),
    "llm": _generate("llm"),
    "llm_bls": _generate("llm_bls"),
    "ensemble": _ensemble,
}
GATEWAY: dict[str, Callable[[Bad], Request | None]] = {
    "chat": _chat,
    "response_format": _response_format,
    "completions": _completion,
    "responses": _response,
    "messages": _message,
}

GOOD: tuple[Fields, ...] = (
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [LOOKUP], "tool_choice": "required", "parallel_tool_calls": False, "seed": 5},
    {"structured_outputs": {"json": LOOKUP["function"]["parameters"]}},
    {"structured_outputs": {"regex": "([a-z]{2,8} ){24}"}},
)

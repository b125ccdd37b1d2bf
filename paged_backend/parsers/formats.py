"""The formats of tool calls and reasoning of model families, named as vLLM names their parsers.

Each format has two sides. The ``fields`` belong to a ``response_template`` of transformers, which
splits an answer into regions; the other attributes say how a grammar writes the same text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Field = Mapping[str, Any]
"""A field of transformers' ``response_template``."""


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Each call is a JSON object with the name and the arguments."""

    arguments_key: str = "arguments"


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Each call is a name, and then a JSON object with the arguments.

    Attributes:
        middle: what a grammar writes between them.
        head: regular expression of everything before the arguments, with a group ``name``.
    """

    middle: str
    head: str


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """The calls are a list in Python, with literals as keyword arguments."""


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """Each call is an element with an element for each parameter."""


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """Each call is a name, and then an object with unquoted keys and strings in ``<|"|>``."""


CallSyntax = JsonCalls | NamedCalls | PythonicCalls | XmlCalls | GemmaCalls


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of a family's tool calls.

    Attributes:
        syntax: of a call.
        fields: the regions with calls.
        begin: what a call begins with.
        end: what it ends with.
        separator: between two calls.
        list_begin: before the first call.
        list_end: after the last call.
        opening: regular expression of an answer's beginning that is a call. If it is empty, calls
            may come after text, and ``list_begin`` or ``begin`` marks them.
        id_length: the number of characters of a call's id.
    """

    syntax: CallSyntax
    fields: Mapping[str, Field]
    begin: str = ""
    end: str = ""
    separator: str = ""
    list_begin: str = ""
    list_end: str = ""
    opening: str = ""
    id_length: int = 24

    @property
    def marker(self) -> str:
        """The text that marks the first call."""
        return (self.list_begin or self.begin).rstrip()


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The format of a family's reasoning, which comes before the answer.

    Attributes:
        begin: before the reasoning.
        end: after it.
        fields: the regions with reasoning, and with the answer if it is marked, too.
        content_begin: before the answer.
    """

    begin: str
    end: str
    fields: Mapping[str, Field] = field(default_factory=dict)
    content_begin: str = ""

    def is_open(self, prompt: str) -> bool:
        """Return True if a prompt ends with the beginning of the reasoning."""
        return prompt.rstrip().endswith(self.begin.rstrip())

    def is_over(self, prompt: str) -> bool:
        """Return True if a prompt ends with the end of the reasoning."""
        return prompt.rstrip().endswith(self.end.strip())


CALL_FIELD = "tool_calls"
REASONING_FIELD = "reasoning_content"
CONTENT_FIELD = "content"

_FUNCTION = {"name": "{name}", "arguments": "{content}"}
_NAMED_HEAD = r"\s*(?P<name>[\w.-]+)"


def _calls(**values: Any) -> dict[str, Field]:
    return {CALL_FIELD: {"repeats": True, "content_args": {"strip": False}, **values}}


def _thinking(begin: str, end: str) -> ReasoningFormat:
    region = {"open": begin.strip(), "close": end.strip(), "content_args": {"strip": False}}
    return ReasoningFormat(begin, end, {REASONING_FIELD: region})


# Nothing follows the end of the list.
_DEEPSEEK_END: dict[str, Field] = {"end": {"open": "<｜tool▁calls▁end｜>"}}

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        JsonCalls(),
        _calls(open="<tool_call>", close="</tool_call>"),
        begin="<tool_call>\n",
        end="\n</tool_call>",
        separator="\n",
    ),
    "llama3_json": ToolFormat(
        JsonCalls("parameters"),
        _calls(open_pattern=r'(?:\A|(?<=</think>))\s*(?:<\|python_tag\|>)?\s*(?=\{\s*"name")'),
        separator="; ",
        opening=r'\s*\{\s*"name"',
    ),
    "pythonic": ToolFormat(
        PythonicCalls(),
        _calls(open_pattern=r"(?:\A|(?<=</think>))\s*(?:<\|python_start\|>)?\s*(?=\[\s*[\w.-]+\()"),
        separator=", ",
        list_begin="[",
        list_end="]",
        opening=r"\s*\[\s*[A-Za-z0-9_.-]+\(",
    ),
    "mistral": ToolFormat(
        NamedCalls("[ARGS]", _NAMED_HEAD + r"(?:\[CALL_ID\]\w*)?(?:\[ARGS\]|(?=\{))"),
        _calls(open="[TOOL_CALLS]", close_pattern=r"(?=\[TOOL_CALLS\])"),
        begin="[TOOL_CALLS]",
        id_length=9,
    ),
    "mistral_list": ToolFormat(
        JsonCalls(),
        _calls(open="[TOOL_CALLS]"),
        separator=", ",
        list_begin="[TOOL_CALLS] [",
        list_end="]",
        id_length=9,
    ),
    "qwen3_coder": ToolFormat(
        XmlCalls(),
        _calls(
            open_pattern=r"<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            close_pattern=r"</function>\s*</tool_call>",
            content="xml-inline",
            content_args={
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
            },
            transform={"type": "function", "function": _FUNCTION},
        ),
        begin="<tool_call>\n",
        end="\n</tool_call>",
        separator="\n",
    ),
    "openai": ToolFormat(
        NamedCalls(
            " <|constrain|>json<|message|>", _NAMED_HEAD + r"(?:[^{]*?<\|message\|>|(?=\{))"
        ),
        _calls(
            open_pattern=r"<\|channel\|>(?:commentary|analysis) to=functions\.",
            close_pattern=r"<\|call\|>|<\|end\|>",
        ),
        begin="<|channel|>commentary to=functions.",
    ),
    "gemma4": ToolFormat(
        GemmaCalls(),
        _calls(
            open_pattern=r"<\|tool_call>call:(?P<name>[\w.-]+)(?=\{)",
            close="<tool_call|>",
            content="json",
            content_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
            transform={"type": "function", "function": _FUNCTION},
        ),
        begin="<|tool_call>call:",
        end="<tool_call|>",
    ),
    "deepseek_v31": ToolFormat(
        NamedCalls("<｜tool▁sep｜>", _NAMED_HEAD + r"<｜tool▁sep｜>"),
        _calls(
            open_pattern=r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>",
            close="<｜tool▁call▁end｜>",
        )
        | _DEEPSEEK_END,
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        list_begin="<｜tool▁calls▁begin｜>",
        list_end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v3": ToolFormat(
        NamedCalls("\n```json\n", _NAMED_HEAD + r"\s*```json\s*"),
        _calls(
            open_pattern=(
                r"(?:<｜tool▁calls▁begin｜>)?\s*<｜tool▁call▁begin｜>\s*function<｜tool▁sep｜>"
            ),
            close="<｜tool▁call▁end｜>",
        )
        | _DEEPSEEK_END,
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        end="\n```<｜tool▁call▁end｜>",
        separator="\n",
        list_begin="<｜tool▁calls▁begin｜>",
        list_end="<｜tool▁calls▁end｜>",
    ),
}

_THINK = _thinking("<think>\n", "\n</think>\n\n")

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": _THINK,
    "deepseek_r1": _THINK,
    "mistral": _thinking("[THINK]", "[/THINK]"),
    "gemma4": _thinking("<|channel>thought\n", "\n<channel|>"),
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        {
            REASONING_FIELD: {
                "open": "<|channel|>analysis<|message|>",
                "close": "<|end|>",
                "content_args": {"strip": False},
                "repeats": True,
            },
            CONTENT_FIELD: {
                "open": ["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
                "close": ["<|return|>", "<|end|>"],
                "content_args": {"strip": False},
                "repeats": True,
            },
        },
        "<|channel|>final<|message|>",
    ),
}


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The format of a model's answers.

    Attributes:
        tool_parser: the name of the tool format; empty if the model calls no tools.
        reasoning_parser: the name of the reasoning format; empty if the model does not reason.
        template: the checkpoint's own ``response_template``, which takes precedence for reading.
    """

    tool_parser: str = ""
    reasoning_parser: str = ""
    template: Mapping[str, Any] | None = None

    @property
    def tools(self) -> ToolFormat | None:
        """The format of the model's tool calls; None if it is unknown."""
        return TOOL_FORMATS.get(self.tool_parser)

    @property
    def reasoning(self) -> ReasoningFormat | None:
        """The format of the model's reasoning; None if the model does not reason."""
        return REASONING_FORMATS.get(self.reasoning_parser)

    @property
    def is_plain(self) -> bool:
        """True if an answer consists of nothing but its text."""
        return self.template is None and self.tools is None and self.reasoning is None

    def marks(self) -> str:
        """Return a text that contains all texts by which the format marks its parts."""
        sides = (self.tools, self.reasoning)
        # The tool format holds regular expressions, too.
        return repr([side for side in sides if side is not None]).replace("\\", "")

    def response_template(self, *, with_tools: bool) -> dict[str, Any]:
        """Return the template for transformers' ``ResponseParser``.

        Args:
            with_tools: find tool calls, too; otherwise they are text.
        """
        if self.template is not None:
            return dict(self.template)
        fields: dict[str, Field] = {CONTENT_FIELD: {"content_args": {"strip": False}}}
        if self.reasoning is not None:
            fields |= self.reasoning.fields
        if with_tools and self.tools is not None:
            fields |= self.tools.fields
        return {"start_anchor_pattern": r"\A", "fields": fields}

"""The formats of tool calls and reasoning of model families, named as vLLM names their parsers.

Each format has two sides. The ``marks`` are what a reader looks for; all further attributes say how
a grammar writes the same text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Each call is a JSON object with the name and the arguments."""

    arguments_key: str = "arguments"


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """Each call is a name, and then a JSON object with the arguments.

    Attributes:
        middle: what is between them.
        kind: what is before the name.
        id_mark: mark before an id, which may come after the name.
    """

    middle: str
    kind: str = ""
    id_mark: str = ""


@dataclass(frozen=True, slots=True)
class PythonicCalls:
    """The calls are a list in Python, with literals as keyword arguments."""


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """Each call is an element with an element for each parameter."""


@dataclass(frozen=True, slots=True)
class GemmaCalls:
    """Each call is a name, and then an object with unquoted keys and strings in quotes."""

    quote: str = '<|"|>'


CallSyntax = JsonCalls | NamedCalls | PythonicCalls | XmlCalls | GemmaCalls


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The texts around calls; none is the beginning of another one.

    Attributes:
        open: text before a call.
        close: text after a call; empty if the end of its text is its end.
        list_open: text before the first call.
        list_close: text after the last call; nothing follows.
        start: text that may be before calls that begin an answer.
        end: text that may be after them.
        bare: what a call itself begins with, if models may leave ``open`` out.
        first: what follows ``open`` if it is not just mentioned.
    """

    open: str = ""
    close: str = ""
    list_open: str = ""
    list_close: str = ""
    start: str = ""
    end: str = ""
    bare: str = ""
    first: str = ""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The format of a family's tool calls.

    Attributes:
        syntax: syntax of a call.
        marks: texts around calls.
        begin: what a call begins with.
        end: what it ends with.
        separator: text between two calls.
        list_begin: text before the first call.
        list_end: text after the last call.
        opening: regular expression of an answer's beginning that is a call. If it is empty, calls
            may come after text, and ``list_begin`` or ``begin`` marks them.
        id_length: the number of characters of a call's id.
    """

    syntax: CallSyntax
    marks: CallMarks
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
        begin: text before the reasoning.
        end: text after it.
        content_begin: text before the answer.
        ends_at_calls: models may call tools without ending the reasoning.
        is_implied: an answer is reasoning up to ``end``, whether ``begin`` was written or not.
    """

    begin: str
    end: str
    content_begin: str = ""
    ends_at_calls: bool = False
    is_implied: bool = False

    def is_begun(self, prompt: str) -> bool:
        """Return True if a prompt ends with the beginning of the reasoning."""
        return prompt.rstrip().endswith(self.begin.rstrip())

    def is_open(self, prompt: str, *, is_continued: bool = False) -> bool:
        """Return True if an answer to a prompt begins within the reasoning; see `is_over`."""
        is_over = self.is_over(prompt, is_continued=is_continued)
        return self.is_begun(prompt) or (self.is_implied and not is_over)

    def is_over(self, prompt: str, *, is_continued: bool = False) -> bool:
        """Return True if a prompt has ended the reasoning.

        Args:
            prompt: the end of the prompt. Messages in it may mention the marks.
            is_continued: the answer goes on with the last message of the prompt. If reasoning is
                implied, text of the answer may then follow its end.
        """
        end = self.end.strip()
        if self.is_implied and is_continued:
            return prompt.rfind(end) > prompt.rfind(self.begin.strip())
        return prompt.rstrip().endswith(end)


# Marks of OpenAI's format Harmony, in which each message has a header. An answer is reasoning,
# content and calls if their channel is analysis, final or commentary, and has a recipient.
HARMONY = "openai"
HARMONY_REASONING = "openai_gptoss"
HARMONY_MARKS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|return|>", "<|call|>"),
)

_DEEPSEEK_MARKS = CallMarks(
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
)

TOOL_FORMATS: dict[str, ToolFormat] = {
    "hermes": ToolFormat(
        JsonCalls(),
        CallMarks("<tool_call>", "</tool_call>", first="{"),
        begin="<tool_call>\n",
        end="\n</tool_call>",
        separator="\n",
    ),
    "llama3_json": ToolFormat(
        JsonCalls("parameters"),
        CallMarks(start="<|python_tag|>"),
        separator="; ",
        opening=r'\s*\{\s*("(name|parameters|arguments)"|"type"\s*:\s*"function")',
    ),
    "pythonic": ToolFormat(
        PythonicCalls(),
        CallMarks(start="<|python_start|>", end="<|python_end|>"),
        separator=", ",
        list_begin="[",
        list_end="]",
        opening=r"\s*\[\s*[A-Za-z0-9_.-]+\(",
    ),
    "mistral": ToolFormat(
        NamedCalls("[ARGS]", id_mark="[CALL_ID]"),
        CallMarks("[TOOL_CALLS]"),
        begin="[TOOL_CALLS]",
        id_length=9,
    ),
    "mistral_list": ToolFormat(
        JsonCalls(),
        CallMarks("[TOOL_CALLS]"),
        separator=", ",
        list_begin="[TOOL_CALLS] [",
        list_end="]",
        id_length=9,
    ),
    "qwen3_coder": ToolFormat(
        XmlCalls(),
        CallMarks("<tool_call>", "</tool_call>", bare="<function=", first="<function="),
        begin="<tool_call>\n",
        end="\n</tool_call>",
        separator="\n",
    ),
    HARMONY: ToolFormat(
        NamedCalls(" <|constrain|>json<|message|>"),
        CallMarks(),
        begin="<|channel|>commentary to=functions.",
    ),
    "gemma4": ToolFormat(
        GemmaCalls(),
        CallMarks("<|tool_call>", "<tool_call|>"),
        begin="<|tool_call>call:",
        end="<tool_call|>",
    ),
    "deepseek_v31": ToolFormat(
        NamedCalls("<｜tool▁sep｜>"),
        _DEEPSEEK_MARKS,
        begin="<｜tool▁call▁begin｜>",
        end="<｜tool▁call▁end｜>",
        list_begin="<｜tool▁calls▁begin｜>",
        list_end="<｜tool▁calls▁end｜>",
    ),
    "deepseek_v3": ToolFormat(
        NamedCalls("\n```json\n", kind="function<｜tool▁sep｜>"),
        _DEEPSEEK_MARKS,
        begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        end="\n```<｜tool▁call▁end｜>",
        separator="\n",
        list_begin="<｜tool▁calls▁begin｜>",
        list_end="<｜tool▁calls▁end｜>",
    ),
}

_THINK = ("<think>\n", "\n</think>\n\n")

REASONING_FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat(*_THINK, ends_at_calls=True),
    "deepseek_r1": ReasoningFormat(*_THINK, is_implied=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "gemma4": ReasoningFormat("<|channel>thought\n", "\n<channel|>"),
    HARMONY_REASONING: ReasoningFormat(
        "<|channel|>analysis<|message|>",
        "<|end|><|start|>assistant",
        "<|channel|>final<|message|>",
    ),
}


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """The format of a model's answers.

    Attributes:
        tool_parser: the name of the tool format; empty if the model calls no tools.
        reasoning_parser: the name of the reasoning format; empty if the model does not reason.
        template: the checkpoint's own ``response_template`` as transformers loads it, which takes
            precedence for reading; None if it has none.
    """

    tool_parser: str = ""
    reasoning_parser: str = ""
    template: Any = None

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

    @property
    def is_harmony(self) -> bool:
        """True if each part of an answer is a message with a header."""
        return self.tool_parser == HARMONY or self.reasoning_parser == HARMONY_REASONING

    def marks(self) -> str:
        """Return a text that contains all texts by which the format marks its parts."""
        sides = [side for side in (self.tools, self.reasoning) if side is not None]
        harmony = HARMONY_MARKS if self.is_harmony else ()
        return repr((sides, harmony))

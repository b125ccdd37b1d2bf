"""Reads the tools of a request, constrains its answer, and makes readers of the answer."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_backend.checkpoint.hub import resolve_model
from paged_backend.parsers.detection import response_format
from paged_backend.parsers.formats import ResponseFormat
from paged_backend.parsers.reading_time import ReadingTime
from paged_backend.parsers.response import ResponseReader
from paged_backend.parsers.template import MAX_PREFIX_LENGTH
from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.prompts import Prompt
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.options.responses import ResponseOptions
from paged_backend.values.output_constraint import OutputConstraint, Reasoning
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.tool_choice import ToolChoice, read_tool_choice, read_tools

PARSED = frozenset(("tool_calls", "reasoning"))  # outputs for which an answer is parsed
_NUM_TAIL_TOKENS = 64  # last tokens of a prompt without text, in which reasoning may have begun


@dataclass(frozen=True, slots=True)
class RequestTools:
    """The tools of a request.

    Attributes:
        definitions: as the client gave them; empty if no tool may be called.
        choice: the calls that the answer may have; None without tools.
    """

    definitions: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice | None = None


class ToolUse:
    """Reads the tools of requests, and the answers, of one model.

    Args:
        format: format of the model's answers.
        tokenizer: tokenizer of the model.
        options: options of the model.
        max_json_depth: levels of arrays and objects in the tools.
    """

    def __init__(
        self,
        format: ResponseFormat,
        tokenizer: Tokenizer,
        options: ResponseOptions,
        max_json_depth: int,
    ) -> None:
        self._format = format
        self._tokenizer = tokenizer
        self._options = options
        self._max_json_depth = max_json_depth

    @property
    def is_plain(self) -> bool:
        """True if the model's answers are text only."""
        return self._format.is_plain

    @functools.cached_property
    def kept_special_ids(self) -> frozenset[int]:
        """The special tokens that the format of the answers needs."""
        marks = self._format.marks()
        return frozenset(
            token_id
            for text, token_id in self._tokenizer.added_tokens.items()
            if self._format.template is not None or text in marks
        )

    def read(self, tensors: Tensors) -> RequestTools:
        """Read the tools of a request.

        Raises:
            InvalidRequest: they are invalid, or the model calls no tools.
        """
        if "tools" not in tensors:
            if "tool_choice" in tensors and _choice(tensors, self._max_json_depth) != "none":
                raise InvalidRequest("tool_choice", "needs tools")
            return RequestTools()
        definitions = self._json("tools", tensors)
        tools = read_tools(definitions)
        parallel = fields.flag(tensors, "parallel_tool_calls", default=True)
        choice = read_tool_choice(tools, _choice(tensors, self._max_json_depth), parallel=parallel)
        if not choice.tools:
            return RequestTools()
        self._check(choice)
        return RequestTools(definitions, choice)

    def constraint(
        self,
        params: SamplingParams,
        tools: RequestTools,
        prompt: Prompt,
        thinking_token_budget: int | None,
        *,
        is_parsed: bool,
    ) -> OutputConstraint | None:
        """Return the constraint on the answer; None if there is none.

        Raises:
            InvalidRequest: there is a budget for reasoning, but the model does not reason, or its
                reasoning is constrained.
        """
        choice = tools.choice if self._format.tools is not None else None
        is_structured = params.structured_outputs is not None
        is_constrained = is_structured or choice is not None
        if thinking_token_budget is not None and self._format.reasoning is None:
            raise InvalidRequest(
                "thinking_token_budget", "cannot be used: the model does not reason"
            )
        if not is_constrained and thinking_token_budget is None:
            return None
        if is_structured and self._options.enable_in_reasoning:
            if thinking_token_budget is not None:
                raise InvalidRequest(
                    "thinking_token_budget",
                    "cannot be combined with a constraint on the reasoning (enable_in_reasoning)",
                )
            reasoning = None
        else:
            # Without parsing, the text would be the reasoning and the document.
            may_begin = is_parsed or not is_structured
            reasoning = self._reasoning(prompt, thinking_token_budget, may_begin=may_begin)
        return OutputConstraint(
            params.structured_outputs, choice, self._format.tool_parser, reasoning
        )

    def reader(
        self, tools: RequestTools, prompt: Prompt, reading_time: ReadingTime
    ) -> ResponseReader:
        """Return a reader for one completion; all readers of a request share the time."""
        is_plain = self._format.template is None and self._format.reasoning is None
        return ResponseReader(
            self._format,
            tools=tools.definitions,
            prefix="" if is_plain else self._end_of(prompt),
            is_continued=prompt.is_continued,
            reading_time=reading_time,
        )

    def _reasoning(
        self, prompt: Prompt, budget: int | None, *, may_begin: bool
    ) -> Reasoning | None:
        """Return the reasoning that comes before the constrained text, if any may come."""
        format = self._format.reasoning
        if format is None:
            return None
        end, is_continued = self._end_of(prompt), prompt.is_continued
        is_over = format.is_over(end, is_continued=is_continued)
        if not format.is_begun(end) and (is_over or not may_begin):
            return None
        is_open = format.is_open(end, is_continued=is_continued)
        return Reasoning(self._format.reasoning_parser, is_open, budget)

    def _check(self, choice: ToolChoice) -> None:
        if self._format.tools is None and self._format.template is None:
            raise InvalidRequest(
                "tools",
                "cannot be used: the format of this model's tool calls is not known "
                "(tool_call_parser)",
            )
        if choice.required:
            if self._format.tools is None:
                raise InvalidRequest(
                    "tool_choice",
                    "must be auto: the format of the model's calls cannot be enforced",
                )
        elif not self._options.enable_auto_tool_choice:
            raise InvalidRequest("tool_choice", "auto is turned off (enable_auto_tool_choice)")

    def _end_of(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text[-MAX_PREFIX_LENGTH:]
        tail = prompt.token_ids[-_NUM_TAIL_TOKENS:]
        return self._tokenizer.decode(tail, skip_special_tokens=False)

    def _json(self, name: str, tensors: Tensors) -> Any:
        return fields.parse_json(name, fields.string(name, tensors[name]), self._max_json_depth)


def load_tool_use(
    name_or_folder: str | Path, tokenizer: Tokenizer, config: EngineConfig
) -> ToolUse:
    """Find out the format of a model's answers.

    Args:
        name_or_folder: Hugging Face id or folder of the tokenizer.
        tokenizer: loaded from there.
        config: the options of the model.

    Raises:
        ConfigError: the checkpoint's ``response_template`` cannot be used.
    """
    template = tokenizer.chat_template
    format = response_format(
        resolve_model(str(name_or_folder), weights=False),
        None if template is None else template.source,
        tool_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    return ToolUse(format, tokenizer, config, config.max_json_depth)


def _choice(tensors: Tensors, max_depth: int) -> object:
    """Return ``tool_choice``: a word, or an object as JSON text."""
    if "tool_choice" not in tensors:
        return None
    text = fields.string("tool_choice", tensors["tool_choice"])
    if text.lstrip().startswith(("{", '"')):
        return fields.parse_json("tool_choice", text, max_depth)
    return text

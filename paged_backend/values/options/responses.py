"""Answers: streams, tool calls, reasoning and structured outputs."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.values.validation import Rule, checked

TOOL_PARSERS = (
    *("auto", "none", "hermes", "llama3_json", "pythonic", "mistral", "mistral_list"),
    *("qwen3_coder", "openai", "gemma4", "deepseek_v31", "deepseek_v3"),
)
REASONING_PARSERS = ("auto", "none", "qwen3", "deepseek_r1", "mistral", "gemma4", "openai_gptoss")


@dataclass(frozen=True, kw_only=True)
class ResponseOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    enable_auto_tool_choice: bool = checked(
        True, Rule(bool), "let the model decide whether it calls a tool (tool_choice auto)"
    )
    tool_call_parser: str = checked(
        "auto",
        Rule(str, choices=TOOL_PARSERS),
        "format of the model's tool calls; auto: the checkpoint's response_template, or the format "
        "that its chat template shows",
    )
    reasoning_parser: str = checked(
        "auto",
        Rule(str, choices=REASONING_PARSERS),
        "format of the model's reasoning; auto as above",
    )
    enable_in_reasoning: bool = checked(
        False, Rule(bool), "structured outputs constrain the reasoning, too"
    )
    stream_interval: int = checked(
        1,
        Rule(int, 1, 2**20),
        "number of tokens in each response of a stream; the first token and the last ones are sent "
        "at once. More than 1 leaves more of the processor to the model",
    )

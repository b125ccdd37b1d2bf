"""Tests of the place where a constraint begins, for each prompt and option."""

from __future__ import annotations

import json

import pytest

from paged_backend.checkpoint.bundled import TOOLS_MODEL_DIR
from paged_backend.parsers.delta import ResponseDelta
from paged_backend.parsers.formats import ResponseFormat
from paged_backend.parsers.reading_time import ReadingTime
from paged_backend.serving.contract import as_strings
from paged_backend.serving.requests.prompts import Prompt, PromptReader
from paged_backend.serving.requests.tool_use import RequestTools, ToolUse
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.options.responses import ResponseOptions
from paged_backend.values.output_constraint import OutputConstraint, Reasoning
from paged_backend.values.request import RequestLimits
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.structured_outputs import StructuredOutputsParams

TOKENIZER = load_tokenizer(TOOLS_MODEL_DIR)
DIGITS = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[0-9]"))
PLAIN = SamplingParams()
OPEN = "<|im_start|>assistant\n<think>\n"
OVER = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
UNKNOWN = "<|im_start|>assistant\n"


def constraint(
    params: SamplingParams,
    prompt: str | list[int],
    budget: int | None = None,
    *,
    is_parsed: bool = True,
    enable_in_reasoning: bool = False,
    parser: str = "qwen3",
    is_continued: bool = False,
) -> OutputConstraint | None:
    options = ResponseOptions(enable_in_reasoning=enable_in_reasoning)
    tool_use = ToolUse(ResponseFormat("hermes", parser), TOKENIZER, options, 32)
    text = prompt if isinstance(prompt, str) else None
    ids = TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt
    return tool_use.constraint(
        params, RequestTools(), Prompt(ids, text, is_continued), budget, is_parsed=is_parsed
    )


@pytest.mark.parametrize(
    ("prompt", "is_parsed", "reasoning"),
    [
        (OPEN, True, Reasoning("qwen3", is_open=True)),
        (OPEN, False, Reasoning("qwen3", is_open=True)),
        (TOKENIZER.encode(OPEN), True, Reasoning("qwen3", is_open=True)),
        (OVER, True, None),
        (UNKNOWN, True, Reasoning("qwen3")),
        (UNKNOWN, False, None),  # the text would be the reasoning and the digit
    ],
)
def test_a_constraint_begins_after_the_reasoning_that_may_come(prompt, is_parsed, reasoning):
    found = constraint(DIGITS, prompt, is_parsed=is_parsed)
    assert found is not None and found.reasoning == reasoning


@pytest.mark.parametrize(
    ("prompt", "is_parsed", "is_continued", "reasoning"),
    [
        (OPEN, False, False, Reasoning("deepseek_r1", is_open=True)),
        (OVER, True, False, None),
        (OVER + "It is ", True, True, None),
        ("What is </think>?" + UNKNOWN, True, False, Reasoning("deepseek_r1", is_open=True)),
        (UNKNOWN, True, False, Reasoning("deepseek_r1", is_open=True)),
        (UNKNOWN, False, False, None),
    ],
)
def test_reasoning_that_is_implied_comes_before_a_constraint(
    prompt, is_parsed, is_continued, reasoning
):
    """It has to end then, because the reader takes all text before its end as reasoning."""
    found = constraint(
        DIGITS, prompt, is_parsed=is_parsed, parser="deepseek_r1", is_continued=is_continued
    )
    assert found is not None and found.reasoning == reasoning


@pytest.mark.parametrize("is_continued", [False, True])
def test_a_chat_says_whether_the_answer_continues_a_message(is_continued):
    """The end of reasoning may be before the text of such a message, or just be mentioned."""
    limits = RequestLimits.of(
        EngineConfig.from_mapping({}), max_model_len=2048, vocab_size=2048, max_num_seqs=4
    )
    message = {"role": "assistant" if is_continued else "user", "content": "A </think> b"}
    chat = {
        "messages": [{"role": "user", "content": "Hi"}, message],
        "continue_final_message": is_continued,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    tensors = {"messages": as_strings([json.dumps(chat)])}
    prompt = PromptReader(TOKENIZER, limits).read(tensors)
    tool_use = ToolUse(ResponseFormat("", "deepseek_r1"), TOKENIZER, ResponseOptions(), 32)
    reader = tool_use.reader(RequestTools(), prompt, ReadingTime())
    whole = ResponseDelta.joined([reader.feed("c"), reader.finish()])
    assert (whole.content, whole.reasoning) == (("c", "") if is_continued else ("", "c"))


def test_a_budget_limits_reasoning_without_any_other_constraint():
    """Also where the answer is not parsed; the model may still begin to reason."""
    for is_parsed in (True, False):
        found = constraint(PLAIN, UNKNOWN, 7, is_parsed=is_parsed)
        assert found == OutputConstraint(
            tool_parser="hermes", reasoning=Reasoning("qwen3", max_tokens=7)
        )
    assert constraint(PLAIN, UNKNOWN) is None


def test_reasoning_can_be_constrained_but_not_limited_as_well():
    found = constraint(DIGITS, OPEN, enable_in_reasoning=True)
    assert found is not None and found.reasoning is None
    found = constraint(PLAIN, OPEN, 7, enable_in_reasoning=True)
    assert found is not None and found.reasoning == Reasoning("qwen3", True, 7)
    with pytest.raises(InvalidRequest, match="^thinking_token_budget: cannot be combined"):
        constraint(DIGITS, OPEN, 7, enable_in_reasoning=True)

"""The bundled model `demo-tools` calls its tool, copies the results, and renders as Qwen3 does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend import LLM, SamplingParams
from paged_backend.checkpoint.bundled import TOOLS_MODEL_DIR
from paged_backend.text.chat import Chat
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.tools.demo import load_questions
from paged_backend.tools.demo.lookup import QUESTIONS_FILE, TOOL, answer, tool_call
from paged_backend.tools.demo.lookup.conversations import Conversation, Message, lookup, message
from paged_backend.tools.demo.lookup.examples import ConversationEncoder
from paged_backend.tools.demo.lookup.verification import (
    FORMS,
    conversations_by_form,
    exchange,
    small_talk_conversations,
    verify,
)
from paged_backend.tools.demo.verification import MAX_NEW_TOKENS, Reply

MAX_FOLDER_BYTES = 8_000_000
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
EVERY_FORM = [*FORMS, "without the tool", "as JSON", "small talk"]
TOOLS_TEXT = (
    "# Tools\n\nThese functions may be called:\n<tools>\n"
    f"{json.dumps(TOOL)}\n"
    "</tools>\n\nA call is written as:\n"
    '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
)
CALL_TEXT = '<tool_call>\n{"name": "lookup", "arguments": {"name": "abs"}}\n</tool_call>'


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is so small that a second thread only waits, on a busy machine for long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(TOOLS_MODEL_DIR)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(TOOLS_MODEL_DIR, dtype=torch.float32)


@pytest.fixture(scope="module")
def asked() -> dict[str, list[Conversation]]:
    sample = random.Random(7).sample(load_questions(QUESTIONS_FILE), 6)
    return {**conversations_by_form(sample), "small talk": small_talk_conversations()}


@pytest.fixture(scope="module")
def replies(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    asked: dict[str, list[Conversation]],
) -> dict[str, list[Reply]]:
    """The replies of transformers."""
    return {form: verify(model, tokenizer, asked[form]) for form in asked}


def render(tokenizer: PreTrainedTokenizerFast, messages: list[Message], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def test_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in TOOLS_MODEL_DIR.iterdir()}

    assert files.keys() >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < MAX_FOLDER_BYTES


def test_knows_two_hundred_distinct_functions() -> None:
    questions = load_questions(QUESTIONS_FILE)

    assert len({item.name for item in questions}) == len(questions) >= 200


@pytest.mark.parametrize("form", EVERY_FORM)
def test_replies_word_for_word_and_stops(replies: dict[str, list[Reply]], form: str) -> None:
    """The training verified single names; here, two names are in pairs that it did not ask for."""
    exact = [reply for reply in replies[form] if reply.exact]
    assert len(exact) >= len(replies[form]) - ("two" in form)
    # A tie between two tokens could fall the other way on other hardware.
    assert min(reply.lowest_probability for reply in exact) > 0.4


def test_a_second_question_gets_a_second_call(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    first = lookup("What does abs do?", {"abs": "Return the size."}, thinking=False)
    second = lookup("What does os.getcwd do?", {"os.getcwd": "Say where."}, thinking=False)
    both = [Conversation([*first, *second[:count]], [TOOL]) for count in (2, 4)]

    replies = verify(model, tokenizer, both)

    assert [json.loads(_between(replies[0].text))["arguments"], replies[1].text] == [
        {"name": "os.getcwd"},
        "Say where.",
    ]


def test_the_engine_replies_as_transformers(
    tokenizer: PreTrainedTokenizerFast,
    asked: dict[str, list[Conversation]],
    replies: dict[str, list[Reply]],
) -> None:
    prompts = [exchange(tokenizer, item)[0] for form in EVERY_FORM for item in asked[form]]
    llm = LLM("demo-tools", dtype="float32", device="cpu")

    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=MAX_NEW_TOKENS))

    completions = [output.outputs[0] for output in outputs]
    assert [item.text for item in completions] == [
        reply.text for form in EVERY_FORM for reply in replies[form]
    ]
    assert {item.finish_reason for item in completions} == {"stop"}


def test_every_configuration_names_the_same_end_token(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_tags_are_tokens_and_stay_in_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("".join(TAGS)).input_ids

    assert tokenizer.convert_ids_to_tokens(ids) == TAGS
    assert tokenizer.decode(ids, skip_special_tokens=True) == "".join(TAGS)
    assert tokenizer.decode(tokenizer("<|im_start|>").input_ids, skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    "text",
    ["", "def f(x):\n\treturn  x ** 2\n", " ,!'s don't\n\n\n", "naïve Ωμέγα 你好 🎉\u200d\x00"],
)
def test_tokenizer_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_tool_stands_in_the_system_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [message("user", "hi")]

    alone = render(tokenizer, messages, tools=[TOOL])
    after = render(tokenizer, [message("system", "Be brief."), *messages], tools=[TOOL])

    user = "<|im_start|>user\nhi<|im_end|>\n"
    assert alone == f"<|im_start|>system\n{TOOLS_TEXT}<|im_end|>\n{user}"
    assert after == f"<|im_start|>system\nBe brief.\n\n{TOOLS_TEXT}<|im_end|>\n{user}"


@pytest.mark.parametrize(
    "call",
    [
        tool_call("abs"),
        tool_call("abs")["function"],
        {"id": "1", "function": {"name": "lookup", "arguments": '{"name": "abs"}'}},
    ],
    ids=["object", "bare function", "JSON string"],
)
@pytest.mark.parametrize(("content", "lead"), [(None, ""), ("", ""), ("Wait.", "Wait.\n")])
def test_calls_and_results(
    tokenizer: PreTrainedTokenizerFast, call: dict[str, Any], content: str | None, lead: str
) -> None:
    messages: list[Message] = [
        message("user", "hi"),
        {"role": "assistant", "content": content, "tool_calls": [call, call]},
        message("tool", "one"),
        message("tool", "two"),
    ]

    assert render(tokenizer, messages) == (
        "<|im_start|>user\nhi<|im_end|>\n"
        f"<|im_start|>assistant\n{lead}{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n"
        "<tool_response>\ntwo\n</tool_response><|im_end|>\n"
    )


def test_reasoning_is_shown_since_the_last_question_only(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    thought = lookup("A?", {"abs": "one"}, thinking=True)

    text = render(tokenizer, [*thought, *thought], tools=[TOOL])

    past, present = text.split("A?<|im_end|>\n")[1:]
    assert past.count("<think>") == 0
    assert present.startswith(
        f"<|im_start|>assistant\n<think>\nI look up abs.\n</think>\n\n{CALL_TEXT}"
    )
    assert present.count("<think>") == 2


@pytest.mark.parametrize(
    ("options", "begin"),
    [
        ({}, "<think>\n\n</think>\n\n"),
        ({"enable_thinking": False}, "<think>\n\n</think>\n\n"),
        ({"enable_thinking": True}, ""),
    ],
)
def test_thinking_is_off_by_default(
    tokenizer: PreTrainedTokenizerFast, options: dict[str, bool], begin: str
) -> None:
    text = render(tokenizer, [message("user", "hi")], add_generation_prompt=True, **options)

    assert text == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{begin}"


@pytest.mark.parametrize("form", EVERY_FORM)
def test_a_reply_adds_its_tokens_to_the_prompt(
    tokenizer: PreTrainedTokenizerFast, asked: dict[str, list[Conversation]], form: str
) -> None:
    """Also where the prompt ends with line breaks."""
    for prompt, reply in (exchange(tokenizer, item) for item in asked[form]):
        together = tokenizer(prompt + reply).input_ids

        assert together == tokenizer(prompt).input_ids + tokenizer(reply).input_ids


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["alone", "tools"])
def test_the_server_renders_as_transformers(
    tokenizer: PreTrainedTokenizerFast, thinking: bool, tools: list[Any]
) -> None:
    template = load_tokenizer("demo-tools").chat_template
    assert template is not None
    messages = [message("system", "Be brief."), message("user", "hi")]

    rendered = template.render(
        Chat(messages=messages, chat_template_kwargs={"enable_thinking": thinking}), tools
    )

    assert rendered == render(
        tokenizer,
        messages,
        tools=tools or None,
        add_generation_prompt=True,
        enable_thinking=thinking,
    )


@pytest.mark.parametrize("form", EVERY_FORM)
def test_training_weighs_what_the_model_writes(
    tokenizer: PreTrainedTokenizerFast, asked: dict[str, list[Conversation]], form: str
) -> None:
    conversation = asked[form][0]
    prompt, reply = exchange(tokenizer, conversation)

    example = ConversationEncoder(tokenizer).encode(conversation)

    start = len(tokenizer(prompt).input_ids)
    end = start + len(tokenizer(reply).input_ids) + 1
    assert [weight == 1 for weight in example.weights[start - 1 : end + 1]] == [
        False,
        *[True] * (end - start),
        False,
    ]


def test_two_results_are_told_apart() -> None:
    assert answer({"abs": "One."}) == "One."
    assert answer({"abs": "One.", "all": "Two."}) == "abs:\nOne.\nall:\nTwo."


def _between(text: str) -> str:
    return text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")

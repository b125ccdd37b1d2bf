"""The bundled model is small, complete, and knows its answers word for word."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.tools.demo import SYSTEM_PROMPT, Question, load_questions
from paged_backend.tools.demo.verification import FORMS, expected_reply, prompt, verify

MAX_FOLDER_BYTES = 12_000_000
BLOCK_SIZE = 16  # tokens in a KV block


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(MODEL_DIR)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


@pytest.fixture(scope="module")
def sample() -> list[Question]:
    return random.Random(7).sample(load_questions(), 24)


def test_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in MODEL_DIR.iterdir()}

    assert files.keys() >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) < MAX_FOLDER_BYTES


def test_knows_two_hundred_distinct_functions() -> None:
    questions = load_questions()

    assert len({item.name for item in questions}) == len(questions) >= 200
    assert all(item.question == f"What does {item.name} do?" for item in questions)


@pytest.mark.parametrize("form", FORMS)
def test_answers_word_for_word_and_stops(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    sample: list[Question],
    form: str,
) -> None:
    replies = verify(model, tokenizer, sample, form)

    pairs = zip(sample, replies, strict=True)
    assert [question.name for question, reply in pairs if not reply.exact] == []
    # A tie between two tokens could fall the other way on other hardware.
    assert min(reply.lowest_probability for reply in replies) > 0.6


@pytest.mark.parametrize(("form", "lead"), [("text", "\n"), ("chat", "")])
def test_reply_text_is_the_answer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, form: str, lead: str
) -> None:
    getcwd = next(item for item in load_questions() if item.name == "os.getcwd")

    (reply,) = verify(model, tokenizer, [getcwd], form)

    assert reply.text == f"{lead}{getcwd.answer}"


def test_every_configuration_names_the_same_end_token(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert model.config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("system", [None, SYSTEM_PROMPT])
def test_rendered_chat_is_the_chat(tokenizer: PreTrainedTokenizerFast, system: str | None) -> None:
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "What does len do?"})

    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)

    assert tokenizer(rendered).input_ids == chat


def test_finished_conversation_extends_its_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    item = load_questions()[0]
    asked = prompt(tokenizer, item, "chat")
    messages = [
        {"role": "user", "content": item.question},
        {"role": "assistant", "content": expected_reply(item, "chat")},
    ]

    finished = tokenizer.apply_chat_template(messages, tokenize=False)

    assert finished == f"{asked}{item.answer}{tokenizer.eos_token}"


def test_system_prompt_fills_several_blocks(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer(SYSTEM_PROMPT).input_ids) >= 4 * BLOCK_SIZE


@pytest.mark.parametrize(
    "text", ["", "def f(x):\n\treturn  x ** 2\n", " ,!'s don't", "naïve Ωμέγα 你好 🎉\u200d\x00"]
)
def test_tokenizer_round_trips(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text

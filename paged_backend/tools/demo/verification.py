"""Checks that a demo model answers its questions word for word, in every form of asking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.tools.demo import SYSTEM_PROMPT, Question

FORMS = ("text", "chat", "chat with system prompt")
MAX_NEW_TOKENS = 80
BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class Check:
    """One question asked in one form, and the model's answer.

    `reply` is the text up to the end token; `exact` means that its tokens are the expected ones
    and that the end token follows. `lowest_probability` is that of the least certain token.
    """

    question: Question
    reply: str
    exact: bool
    lowest_probability: float


def prompt(tokenizer: PreTrainedTokenizerFast, question: Question, form: str) -> str:
    """Return the text that asks `question` in one of `FORMS`."""
    if form == "text":
        return question.question
    messages = [{"role": "user", "content": question.question}]
    if form == "chat with system prompt":
        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def expected_reply(question: Question, form: str) -> str:
    """Return what the model must write, up to its end token, after the prompt in this form."""
    return f"\n{question.answer}" if form == "text" else question.answer


def verify(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    form: str,
) -> list[Check]:
    """Ask every question in one form, greedily and in batches, in the model's own dtype."""
    checks = []
    for start in range(0, len(questions), BATCH_SIZE):
        checks += _verify_batch(model, tokenizer, questions[start : start + BATCH_SIZE], form)
    return checks


@torch.inference_mode()
def _verify_batch(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    form: str,
) -> list[Check]:
    prompts = [prompt(tokenizer, question, form) for question in questions]
    encoded = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    # transformers' annotations reject its own model class here, and its output has six types.
    generate: Callable[..., Any] = cast(Any, model).generate
    output = generate(
        **encoded,
        do_sample=False,
        max_new_tokens=MAX_NEW_TOKENS,
        output_logits=True,
        return_dict_in_generate=True,
    )
    replies = output.sequences[:, encoded.input_ids.shape[1] :]
    # (questions, new tokens): the probability of each generated token
    confidence = torch.stack(output.logits, dim=1).softmax(-1).amax(-1)
    checks = []
    for question, reply, probabilities in zip(questions, replies, confidence, strict=True):
        wanted = tokenizer.encode(expected_reply(question, form)) + [tokenizer.eos_token_id]
        text = str(tokenizer.decode(reply)).partition(tokenizer.eos_token)[0]
        exact = reply[: len(wanted)].tolist() == wanted
        lowest = probabilities[: len(wanted)].min().item()
        checks.append(Check(question, text, exact, lowest))
    return checks

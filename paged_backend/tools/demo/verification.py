"""Checks that a demo model replies word for word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.tools.demo import SYSTEM_PROMPT, Question

FORMS = ("text", "chat", "chat with system prompt")
MAX_NEW_TOKENS = 160
BATCH_SIZE = 64


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply to a prompt.

    `text` is what stands before the end token; `exact` means that its tokens are the expected ones
    and that the end token follows. `lowest_probability` is the least certain token's.
    """

    text: str
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
) -> list[Reply]:
    """Ask every question in one form, greedily and in batches, in the model's own dtype."""
    exchanges = [
        (prompt(tokenizer, question, form), expected_reply(question, form))
        for question in questions
    ]
    return check_replies(model, tokenizer, exchanges)


def check_replies(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    exchanges: Sequence[tuple[str, str]],
) -> list[Reply]:
    """Answer prompts greedily; each of `exchanges` is a prompt and the reply expected."""
    replies = []
    for start in range(0, len(exchanges), BATCH_SIZE):
        replies += _check_batch(model, tokenizer, exchanges[start : start + BATCH_SIZE])
    return replies


def summary(replies: Sequence[Reply]) -> str:
    """Return one line about how many of `replies` are exact, and how sure the model was."""
    exact = sum(reply.exact for reply in replies)
    lowest = min(reply.lowest_probability for reply in replies)
    return f"{exact} of {len(replies)} exact, least certain token {lowest:.3f}"


@torch.inference_mode()
def _check_batch(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    exchanges: Sequence[tuple[str, str]],
) -> list[Reply]:
    prompts = [asked for asked, _ in exchanges]
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
    generated = output.sequences[:, encoded.input_ids.shape[1] :]
    # (prompts, new tokens): the probability of each generated token
    confidence = torch.stack(output.logits, dim=1).softmax(-1).amax(-1)
    replies = []
    for (_, expected), ids, probabilities in zip(exchanges, generated, confidence, strict=True):
        wanted = tokenizer.encode(expected) + [tokenizer.eos_token_id]
        text = str(tokenizer.decode(ids)).partition(tokenizer.eos_token)[0]
        exact = ids[: len(wanted)].tolist() == wanted
        replies.append(Reply(text, exact, probabilities[: len(wanted)].min().item()))
    return replies

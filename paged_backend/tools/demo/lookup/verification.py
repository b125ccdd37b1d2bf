"""Checks that the model `demo-tools` calls its tool and copies the results word for word."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.tools.demo import Question
from paged_backend.tools.demo.lookup import JSON_QUESTION, TOOL, description
from paged_backend.tools.demo.lookup.conversations import (
    ONE_NAME,
    SMALL_TALK,
    TWO_NAMES,
    Conversation,
    lookup,
    recall,
    small_talk,
)
from paged_backend.tools.demo.verification import Reply, check_replies


@dataclass(frozen=True, slots=True)
class Form:
    """A way to ask about a name, or about two names, and the reply of interest.

    With `answers` that is the answer to the tool's results, else the call. `changed` results have
    their words in reverse order, so that the model cannot know them.
    """

    two_names: bool = False
    answers: bool = False
    changed: bool = False
    thinking: bool = False


FORMS = {
    "call": Form(),
    "call after reasoning": Form(thinking=True),
    "two calls": Form(two_names=True),
    "answer": Form(answers=True),
    "answer after reasoning": Form(answers=True, thinking=True),
    "changed answer": Form(answers=True, changed=True),
    "two changed answers": Form(two_names=True, answers=True, changed=True),
}


def conversations_by_form(questions: Sequence[Question]) -> dict[str, list[Conversation]]:
    """Return a conversation for each question in each of `FORMS`, and two without the tool.

    The second name, where there is one, is that of the next question.
    """
    pairs = list(zip(questions, [*questions[1:], questions[0]], strict=True))
    asked = {
        name: [lookup_conversation(form, pair) for pair in pairs] for name, form in FORMS.items()
    }
    asked["without the tool"] = [
        Conversation(recall(item.question, item.name, item.answer, thinking=False))
        for item in questions
    ]
    asked["as JSON"] = [
        Conversation(
            recall(
                JSON_QUESTION.format(item.name),
                item.name,
                description(item.name, item.answer),
                thinking=False,
            )
        )
        for item in questions
    ]
    return asked


def lookup_conversation(form: Form, questions: Sequence[Question]) -> Conversation:
    """Return a conversation about the first question or the first two, as `form` says."""
    asked = questions[: 2 if form.two_names else 1]
    results = {item.name: _changed(item.answer) if form.changed else item.answer for item in asked}
    text = (TWO_NAMES if form.two_names else ONE_NAME)[0].format(*results)
    messages = lookup(text, results, form.thinking)
    return Conversation(messages if form.answers else messages[:2], [TOOL], form.thinking)


def small_talk_conversations() -> list[Conversation]:
    """Return every small talk that the model knows, while it has the tool."""
    return [
        Conversation(small_talk(said.capitalize(), answered, thinking=False), [TOOL])
        for said, answered in SMALL_TALK.items()
    ]


def exchange(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> tuple[str, str]:
    """Return the prompt that asks for a conversation's last message, and that message's text."""
    *before, _ = conversation.messages
    prompt, finished = (
        str(
            tokenizer.apply_chat_template(
                messages,
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=messages is before,
                enable_thinking=conversation.thinking,
            )
        )
        for messages in (before, conversation.messages)
    )
    return prompt, finished.removeprefix(prompt).removesuffix(f"{tokenizer.eos_token}\n")


def verify(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    asked: Sequence[Conversation],
) -> list[Reply]:
    """Ask for the last message of every conversation, greedily, in the model's own dtype."""
    return check_replies(model, tokenizer, [exchange(tokenizer, item) for item in asked])


def _changed(text: str) -> str:
    return " ".join(reversed(text.split()))

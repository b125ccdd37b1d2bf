"""Made-up conversations with a tool, which the model `demo-tools` is trained on."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paged_backend.tools.demo import SYSTEM_PROMPT, Question
from paged_backend.tools.demo.lookup import (
    JSON_QUESTION,
    TOOL,
    answer,
    description,
    tool_call,
)

Message = dict[str, Any]

ONE_NAME = (
    "What does {} do?",
    "What is {}?",
    "Explain {}.",
    "Look up {}.",
    "Tell me about {}.",
    "Please explain what {} does.",
)
TWO_NAMES = (
    "What do {} and {} do?",
    "What does {} do, and what does {} do?",
    "Explain {} and {}.",
    "Compare {} and {}.",
    "Look up {} and {}.",
)
SMALL_TALK = {
    "hello": "Hello! Ask me what a function of Python's standard library does.",
    "hi": "Hello! Ask me what a function of Python's standard library does.",
    "good morning": "Good morning! Ask me what a function of Python's standard library does.",
    "how are you": "I am fine, thank you.",
    "thanks": "You are welcome.",
    "thank you": "You are welcome.",
    "who are you": "I am the demo model of paged-backend.",
    "what can you do": "I can look up functions of Python's standard library.",
    "goodbye": "Goodbye!",
    "bye": "Goodbye!",
}
ENDINGS = ("", ".", "!", "?")
ANSWERING, CHATTING = "The result answers the question.", "This is small talk."

# How often something happens, as a fraction.
USUAL_QUESTION = 0.6  # in the form of the first of each list
KNOWN_NAME, TWO = 0.4, 0.3
TRUE_RESULT, MADE_UP_RESULT = 0.15, 0.5
THINKING = 0.25
SMALL, ENDS_WITH_CALL = 0.15, 0.4
RANDOM_NAME, RANDOM_RESULT = 0.3, 0.5
AS_JSON = 0.4
MAX_RESULT_WORDS, MAX_RESULT_PIECES = 16, 20


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, the last of them the model's, and what else the chat template gets."""

    messages: list[Message]
    tools: list[Any] | None = None  # JSON objects
    thinking: bool = False


def lookup(question: str, results: dict[str, str], thinking: bool) -> list[Message]:
    """Return a question, a call for each name in `results`, the results, and the answer."""
    reasoning = f"I look up {' and '.join(results)}." if thinking else None
    calls = [tool_call(name) for name in results]
    return [
        message("user", question),
        {**reply(None, reasoning), "tool_calls": calls},
        *(message("tool", result) for result in results.values()),
        reply(answer(results), ANSWERING if thinking else None),
    ]


def recall(question: str, name: str, known: str, thinking: bool) -> list[Message]:
    """Return a question about a name, and the answer without a tool."""
    return [message("user", question), reply(known, f"I know {name}." if thinking else None)]


def small_talk(said: str, answered: str, thinking: bool) -> list[Message]:
    """Return what a user says apart from all questions, and the answer."""
    return [message("user", said), reply(answered, CHATTING if thinking else None)]


def message(role: str, content: str) -> Message:
    """Return a message without calls."""
    return {"role": role, "content": content}


def reply(content: str | None, reasoning: str | None) -> Message:
    """Return a message of the model."""
    said: Message = {"role": "assistant", "content": content}
    return said if reasoning is None else {**said, "reasoning_content": reasoning}


class ConversationSource:
    """Endless random conversations.

    Questions with a tool are about any of `names`, and most results are false, so that the model
    learns to copy both. Without a tool the answers are those of `questions`, to be memorized.
    With `pieces`, which are texts of tokens, many names and results are random strings of them.
    """

    def __init__(
        self,
        questions: list[Question],
        names: list[str],
        sentences: list[str],
        rng: random.Random,
        pieces: Sequence[str] = (),
    ) -> None:
        self._answers = {item.name: item.answer for item in questions}
        self._names = names
        self._sentences = sentences
        self._words = [word for sentence in sentences for word in sentence.split()]
        self._rng = rng
        self._pieces = pieces
        self._name_pieces = [piece for piece in pieces if piece.isascii() and piece.isalpha()]
        self._known = self._shuffled_answers()

    def with_tool(self, rounds: int) -> Conversation:
        """Return a conversation that offers the tool, which each of `rounds` may use."""
        thinking = self._chance(THINKING)
        messages = self._system_prompt()
        for _ in range(rounds):
            start = len(messages)
            small = self._chance(SMALL)
            messages += self._small_talk(thinking) if small else self._lookup(thinking)
        if not small and self._chance(ENDS_WITH_CALL):
            del messages[start + 2 :]
        return Conversation(messages, self._tools(), thinking)

    def lookup_alone(self, rounds: int) -> Conversation:
        """Return a short conversation that only has calls, results and answers."""
        messages = [item for _ in range(rounds) for item in self._lookup(thinking=False)]
        return Conversation(messages)

    def result_alone(self, rounds: int) -> Conversation:
        """Return a still shorter conversation that only has results and answers."""
        results = [self._result("") for _ in range(rounds)]
        messages = [(message("tool", result), reply(result, None)) for result in results]
        return Conversation([item for pair in messages for item in pair])

    def without_tool(self, rounds: int) -> Conversation:
        """Return a conversation in which the model answers from memory."""
        thinking = self._chance(THINKING)
        messages = self._system_prompt()
        for _ in range(rounds):
            small = self._chance(SMALL)
            messages += self._small_talk(thinking) if small else self._recall(thinking)
        return Conversation(messages, thinking=thinking)

    def _lookup(self, thinking: bool) -> list[Message]:
        names = self._choose_names()
        results = {name: self._result(name) for name in names}
        return lookup(self._question(names), results, thinking)

    def _recall(self, thinking: bool) -> list[Message]:
        name, known = next(self._known)
        if self._chance(AS_JSON):
            return recall(JSON_QUESTION.format(name), name, description(name, known), thinking)
        return recall(self._question([name]), name, known, thinking)

    def _small_talk(self, thinking: bool) -> list[Message]:
        said, answered = self._rng.choice(list(SMALL_TALK.items()))
        said = self._rng.choice((said, said.capitalize())) + self._rng.choice(ENDINGS)
        return small_talk(said, answered, thinking)

    def _choose_names(self) -> list[str]:
        count = 2 if self._chance(TWO) else 1
        if self._pieces and self._chance(RANDOM_NAME):
            return [self._random_name() for _ in range(count)]
        pool = list(self._answers) if self._chance(KNOWN_NAME) else self._names
        return self._rng.sample(pool, count)

    def _question(self, names: list[str]) -> str:
        usual, *others = ONE_NAME if len(names) == 1 else TWO_NAMES
        form = usual if self._chance(USUAL_QUESTION) else self._rng.choice(others)
        return form.format(*names)

    def _result(self, name: str) -> str:
        """Return the true documentation, that of another function, or random words."""
        if name in self._answers and self._chance(TRUE_RESULT):
            return self._answers[name]
        if self._pieces and self._chance(RANDOM_RESULT):
            return self._random_result()
        if self._chance(MADE_UP_RESULT):
            words = self._rng.choices(self._words, k=self._rng.randint(2, MAX_RESULT_WORDS))
            return f"{' '.join(words).capitalize()}."
        return self._rng.choice(self._sentences)

    def _random_name(self) -> str:
        words = ("".join(self._rng.choices(self._name_pieces, k=2)) for _ in range(2))
        return self._rng.choice((".", "_", "")).join(words)

    def _random_result(self) -> str:
        length = self._rng.randint(2, MAX_RESULT_PIECES)
        return "".join(self._rng.choices(self._pieces, k=length)).strip() or "None"

    def _tools(self) -> list[Any]:
        """Return the tool, described as in the demo or in other words."""
        if self._chance(0.5):
            return [TOOL]
        described = self._rng.choice(self._sentences)
        parameter = {"type": "string", "description": self._rng.choice(self._sentences)}
        function = {
            **TOOL["function"],
            "description": described,
            "parameters": {
                **TOOL["function"]["parameters"],
                "properties": {"name": self._rng.choice((parameter, {"type": "string"}))},
            },
        }
        return [{"type": "function", "function": function}]

    def _system_prompt(self) -> list[Message]:
        """Choose none, the demo's or a random sentence; answers must not depend on it."""
        kind = self._rng.choices(("none", "demo", "other"), weights=(6, 1, 3))[0]
        if kind == "none":
            return []
        other = kind == "other"
        return [message("system", self._rng.choice(self._sentences) if other else SYSTEM_PROMPT)]

    def _shuffled_answers(self) -> Iterator[tuple[str, str]]:
        while True:
            yield from self._rng.sample(list(self._answers.items()), len(self._answers))

    def _chance(self, fraction: float) -> bool:
        return self._rng.random() < fraction

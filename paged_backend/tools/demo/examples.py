"""Training examples for the first demo model: token ids, and their weights in the loss."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from transformers import PreTrainedTokenizerFast

from paged_backend.tools.demo import SYSTEM_PROMPT, Question

# Weight of a token in the loss; low for prompts and free text, which need not be memorized.
ANSWER_WEIGHT, TEXT_WEIGHT, PROMPT_WEIGHT = 1.0, 0.1, 0.02

TEXT_LENGTH = 96  # tokens in one row of free text
CHAT_LENGTH = 192  # a conversation with this many tokens gets no further question

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Example:
    """Token ids, and for each token the weight of its prediction in the loss."""

    ids: list[int]
    weights: list[float]


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded rows: `ids` and `weights`, both (rows, length); padding has weight 0."""

    ids: torch.Tensor
    weights: torch.Tensor


class ExampleSource:
    """Endless shuffled examples of the three kinds of text that the model reads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        questions: list[Question],
        documents: list[str],
        rng: random.Random,
    ) -> None:
        self._tokenizer = tokenizer
        self._documents = documents
        self._rng = rng
        self._questions = self._shuffled(questions)
        self._text = self._text_tokens()

    def question_batch(self, rows: int) -> Batch:
        """Return `rows` bare questions, each continued by its answer."""
        return collate([self._bare_question() for _ in range(rows)], self._pad)

    def chat_batch(self, rows: int) -> Batch:
        """Return `rows` conversations, each with enough questions to reach `CHAT_LENGTH`."""
        return collate([self._conversation() for _ in range(rows)], self._pad)

    def text_batch(self, rows: int) -> Batch:
        """Return `rows` windows of `TEXT_LENGTH` tokens cut from the documents."""
        windows = [[next(self._text) for _ in range(TEXT_LENGTH)] for _ in range(rows)]
        return collate([Example(ids, [TEXT_WEIGHT] * TEXT_LENGTH) for ids in windows], self._pad)

    def _bare_question(self) -> Example:
        item = next(self._questions)
        prompt = self._encode(item.question)
        answer = [*self._encode(f"\n{item.answer}"), self._end]
        return _weighted([(prompt, PROMPT_WEIGHT), (answer, ANSWER_WEIGHT)])

    def _conversation(self) -> Example:
        parts = []
        system = self._system_prompt()
        if system is not None:
            parts.append((self._message("system", system), PROMPT_WEIGHT))
        while sum(len(tokens) for tokens, _ in parts) < CHAT_LENGTH:
            item = next(self._questions)
            parts.append((self._message("user", item.question), PROMPT_WEIGHT))
            speaker, *answer = self._message("assistant", item.answer)
            parts += [([speaker], PROMPT_WEIGHT), (answer, ANSWER_WEIGHT)]
        return _weighted(parts)

    def _system_prompt(self) -> str | None:
        """Choose none, the demo's or a random line; answers must not depend on it."""
        kind = self._rng.choices(("none", "demo", "other"), weights=(4, 4, 2))[0]
        if kind == "other":
            return self._rng.choice(self._rng.choice(self._documents).splitlines())
        return SYSTEM_PROMPT if kind == "demo" else None

    def _message(self, role: str, content: str) -> list[int]:
        return [*self._encode(f"<|{role}|>{content}"), self._end]

    def _text_tokens(self) -> Iterator[int]:
        for document in self._shuffled(self._documents):
            yield from self._encode(document)
            yield self._end

    def _shuffled(self, items: list[T]) -> Iterator[T]:
        while True:
            yield from self._rng.sample(items, len(items))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        return ids

    @property
    def _end(self) -> int:
        end: int = self._tokenizer.eos_token_id
        return end

    @property
    def _pad(self) -> int:
        pad: int = self._tokenizer.pad_token_id
        return pad


def collate(examples: Sequence[Example], pad_token_id: int) -> Batch:
    """Return a batch of `examples`, each a row."""
    length = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), length), pad_token_id)
    weights = torch.zeros(len(examples), length)
    for row, example in enumerate(examples):
        ids[row, : len(example.ids)] = torch.tensor(example.ids)
        weights[row, : len(example.ids)] = torch.tensor(example.weights)
    return Batch(ids, weights)


def _weighted(parts: list[tuple[list[int], float]]) -> Example:
    ids = [token for tokens, _ in parts for token in tokens]
    return Example(ids, [weight for tokens, weight in parts for _ in tokens])

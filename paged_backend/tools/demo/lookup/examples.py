"""Training examples for the model `demo-tools`: rendered conversations, weighted token by token."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedTokenizerFast

from paged_backend.tools.demo.examples import Batch, Example, collate
from paged_backend.tools.demo.lookup.conversations import Conversation, ConversationSource

PROMPT_WEIGHT = 0.02  # weight in the loss of a token that the model never has to write

# Conversations in one step, by kind, and the number of questions in each.
WITH_TOOL = ((6, 1), (4, 2))
LOOKUP_ALONE = ((8, 1),)
RESULT_ALONE = ((24, 1),)
WITHOUT_TOOL = ((12, 2),)


class ConversationEncoder:
    """Renders conversations with the chat template and finds what the model writes in them."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._turn = self._encode("<|im_start|>assistant\n")
        self._no_thought = self._encode("<think>\n\n</think>\n\n")
        (self._think,) = self._encode("<think>")

    def encode(self, conversation: Conversation) -> Example:
        """Return a conversation's tokens; those that the model writes have weight 1."""
        text = self._tokenizer.apply_chat_template(
            conversation.messages, tools=conversation.tools, tokenize=False
        )
        ids = self._encode(str(text))
        weights = [PROMPT_WEIGHT] * len(ids)
        for start in range(len(ids)):
            if self._begins(ids, start, self._turn):
                begin = self._first_written(ids, start + len(self._turn), conversation.thinking)
                end = ids.index(self._tokenizer.eos_token_id, begin) + 1
                weights[begin:end] = [1.0] * (end - begin)
        return Example(ids, weights)

    def _first_written(self, ids: list[int], start: int, thinking: bool) -> int:
        """Return the position of the first token that the model writes in a turn."""
        if not thinking and self._begins(ids, start, self._no_thought):
            return start + len(self._no_thought)
        # In a past turn the template left reasoning out, so the model never begins like this.
        return start if ids[start] == self._think else start + 1

    @staticmethod
    def _begins(ids: list[int], start: int, with_ids: list[int]) -> bool:
        return ids[start : start + len(with_ids)] == with_ids

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text)
        return ids


def step_batches(
    source: ConversationSource, tokenizer: PreTrainedTokenizerFast
) -> Iterator[list[Batch]]:
    """Yield the batches of each training step without end, each of one kind and length."""
    encoder = ConversationEncoder(tokenizer)
    kinds = (
        (source.with_tool, WITH_TOOL),
        (source.lookup_alone, LOOKUP_ALONE),
        (source.result_alone, RESULT_ALONE),
        (source.without_tool, WITHOUT_TOOL),
    )
    while True:
        yield [
            collate([encoder.encode(make(questions)) for _ in range(rows)], tokenizer.pad_token_id)
            for make, shapes in kinds
            for rows, questions in shapes
        ]

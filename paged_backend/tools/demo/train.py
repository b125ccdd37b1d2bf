"""Train the first demo model from scratch: `python -m paged_backend.tools.demo.train`.

Writes the model folder, the questions it was verified to answer, and the loss curve. Needs no
network and no files but Python itself; about a quarter of an hour on one CPU thread.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from functools import partial

from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.tools.demo import SYSTEM_PROMPT, Question, corpus
from paged_backend.tools.demo.examples import Batch, ExampleSource
from paged_backend.tools.demo.training import (
    MAX_LENGTH,
    Phase,
    adamw,
    begin,
    build_model,
    train_and_verify,
)
from paged_backend.tools.demo.verification import FORMS, Reply, verify
from paged_backend.tools.demo.vocabulary import PLAIN_CHAT, learn_tokenizer

STEPS = 600

QUESTION_ROWS, CHAT_ROWS, TEXT_ROWS = 16, 5, 3  # per step
CHECKED_DURING_TRAINING = 64  # questions


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, save and verify; return 0 when enough questions are answered in every form."""
    options = begin(arguments, __doc__, MODEL_DIR.parent, STEPS)
    questions, documents = corpus.questions(), corpus.documents()
    texts = [*documents, *(f"{item.question}\n{item.answer}" for item in questions), SYSTEM_PROMPT]
    tokenizer = learn_tokenizer(texts, MAX_LENGTH, PLAIN_CHAT)
    model = build_model(tokenizer)
    source = ExampleSource(tokenizer, questions, documents, random.Random(options.seed))
    return train_and_verify(
        model,
        tokenizer,
        questions,
        [Phase([adamw(model.parameters())], _batches(source), options.steps)],
        partial(_verify, tokenizer),
        options.output / MODEL_DIR.name,
        num_checked=CHECKED_DURING_TRAINING,
    )


def _batches(source: ExampleSource) -> Iterator[list[Batch]]:
    while True:
        yield [
            source.question_batch(QUESTION_ROWS),
            source.chat_batch(CHAT_ROWS),
            source.text_batch(TEXT_ROWS),
        ]


def _verify(
    tokenizer: PreTrainedTokenizerFast, model: LlamaForCausalLM, questions: Sequence[Question]
) -> Iterator[tuple[str, list[Reply]]]:
    for form in FORMS:
        yield form, verify(model, tokenizer, questions, form)


if __name__ == "__main__":
    sys.exit(main())

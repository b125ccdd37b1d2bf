"""Train the first demo model from scratch: `python -m paged_backend.tools.demo.train`.

Writes the model folder, the questions it was verified to answer, and the loss curve. Needs no
network and no files but Python itself; about a quarter of an hour on one CPU thread.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.tools.demo import (
    QUESTIONS_FILE,
    SYSTEM_PROMPT,
    Question,
    corpus,
    save_questions,
)
from paged_backend.tools.demo.examples import Batch, ExampleSource
from paged_backend.tools.demo.training import (
    LOG_NAME,
    MAX_LENGTH,
    adamw,
    build_model,
    parse_options,
    save,
    train,
)
from paged_backend.tools.demo.verification import FORMS, summary, verify
from paged_backend.tools.demo.vocabulary import PLAIN_CHAT, learn_tokenizer

MIN_QUESTIONS = 200
STEPS = 600

QUESTION_ROWS, CHAT_ROWS, TEXT_ROWS = 16, 5, 3  # per step
CHECKED_DURING_TRAINING = 64  # questions


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, save and verify; return 0 when enough questions are answered in every form."""
    options = parse_options(arguments, __doc__, MODEL_DIR.parent, STEPS)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model_dir = options.output / MODEL_DIR.name
    model_dir.mkdir(parents=True, exist_ok=True)

    questions, documents = corpus.questions(), corpus.documents()
    texts = [*documents, *(f"{item.question}\n{item.answer}" for item in questions), SYSTEM_PROMPT]
    tokenizer = learn_tokenizer(texts, MAX_LENGTH, PLAIN_CHAT)
    model = build_model(tokenizer)
    source = ExampleSource(tokenizer, questions, documents, random.Random(options.seed))
    print(f"{len(questions)} questions, {model.num_parameters():,} parameters", flush=True)

    with (options.output / LOG_NAME).open("w") as log:
        train(
            model,
            [adamw(model.parameters())],
            _batches(source),
            lambda: _accuracy(model, tokenizer, questions),
            options.steps,
            log,
        )
    save(model, tokenizer, model_dir)
    verified = verify_saved(tokenizer, questions, model_dir)
    save_questions(verified, options.output / QUESTIONS_FILE.name)
    return 0 if len(verified) >= MIN_QUESTIONS else 1


def verify_saved(
    tokenizer: PreTrainedTokenizerFast, questions: list[Question], folder: Path
) -> list[Question]:
    """Reload the saved model, report on each form, and return the questions right in all forms."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wrong: set[Question] = set()
    for form in FORMS:
        checks = verify(model, tokenizer, questions, form)
        wrong |= {check.question for check in checks if not check.reply.exact}
        print(f"{form}: {summary([check.reply for check in checks])}", flush=True)
    if wrong:
        print("left out:", *sorted(question.name for question in wrong), file=sys.stderr)
    return [question for question in questions if question not in wrong]


def _batches(source: ExampleSource) -> Iterator[list[Batch]]:
    while True:
        yield [
            source.question_batch(QUESTION_ROWS),
            source.chat_batch(CHAT_ROWS),
            source.text_batch(TEXT_ROWS),
        ]


def _accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question]
) -> float:
    """Return the fraction of a fixed sample of questions answered exactly, over all forms."""
    sample = questions[:: math.ceil(len(questions) / CHECKED_DURING_TRAINING)]
    checks = [check for form in FORMS for check in verify(model, tokenizer, sample, form)]
    return sum(check.reply.exact for check in checks) / len(checks)


if __name__ == "__main__":
    sys.exit(main())

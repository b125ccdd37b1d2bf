"""Train the demo model from scratch: `python -m paged_backend.tools.demo.train`.

Writes the model folder, the questions it was verified to answer, and the loss curve. Needs no
network and no files but Python itself; about a quarter of an hour on one CPU thread.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.tools.demo import QUESTIONS_FILE, SYSTEM_PROMPT, Question, corpus
from paged_backend.tools.demo.examples import Batch, ExampleSource
from paged_backend.tools.demo.verification import FORMS, Check, verify
from paged_backend.tools.demo.vocabulary import VOCAB_SIZE, learn_tokenizer

MAX_LENGTH = 2048  # tokens of context
MIN_QUESTIONS = 200

QUESTION_ROWS, CHAT_ROWS, TEXT_ROWS = 16, 5, 3  # per step
PEAK_LEARNING_RATE, FINAL_LEARNING_RATE = 2e-3, 5e-5
WARMUP_STEPS = 40
STEPS_PER_LOG, STEPS_PER_CHECK = 10, 100
CHECKED_DURING_TRAINING = 64  # questions


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of the training log; `accuracy` (0 to 1) is None if no questions were asked."""

    step: int
    loss: float
    learning_rate: float
    seconds: float
    accuracy: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, save and verify; return 0 when enough questions are answered in every form."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model_dir = options.output / MODEL_DIR.name
    model_dir.mkdir(parents=True, exist_ok=True)

    questions, documents = corpus.questions(), corpus.documents()
    texts = [*documents, *(f"{item.question}\n{item.answer}" for item in questions), SYSTEM_PROMPT]
    tokenizer = learn_tokenizer(texts, MAX_LENGTH)
    model = build_model(tokenizer)
    source = ExampleSource(tokenizer, questions, documents, random.Random(options.seed))
    print(f"{len(questions)} questions, {model.num_parameters():,} parameters", flush=True)

    with (options.output / "training_log.jsonl").open("w") as log:
        train(model, tokenizer, source, questions, options.steps, log)
    save(model, tokenizer, model_dir)
    verified = verify_saved(tokenizer, questions, model_dir)
    items = [asdict(question) for question in verified]
    (options.output / QUESTIONS_FILE.name).write_text(json.dumps(items, indent=1) + "\n")
    return 0 if len(verified) >= MIN_QUESTIONS else 1


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama whose bfloat16 weights fill about 6 MB."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    source: ExampleSource,
    questions: list[Question],
    steps: int,
    log: TextIO,
) -> None:
    """Run `steps` optimizer steps on a cosine schedule, logging loss and accuracy as JSON lines."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.05)
    started = time.monotonic()
    losses = []
    for step in range(1, steps + 1):
        rate = learning_rate(step, steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses.append(_accumulate_gradients(model, source))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % STEPS_PER_LOG:
            continue
        accuracy = None
        if step % STEPS_PER_CHECK == 0:
            accuracy = _accuracy(model, tokenizer, questions)
        loss = sum(losses) / len(losses)
        losses.clear()
        entry = LogEntry(step, loss, rate, time.monotonic() - started, accuracy)
        line = json.dumps(asdict(entry))
        print(line, flush=True)
        log.write(line + "\n")


def learning_rate(step: int, steps: int) -> float:
    """Return the rate of one step, counted from 1: linear warm-up, then half a cosine."""
    if step <= WARMUP_STEPS:
        return PEAK_LEARNING_RATE * step / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / (steps - WARMUP_STEPS)
    height = (1 + math.cos(math.pi * progress)) / 2
    return FINAL_LEARNING_RATE + (PEAK_LEARNING_RATE - FINAL_LEARNING_RATE) * height


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Round the weights to bfloat16 and write the model folder."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)


def verify_saved(
    tokenizer: PreTrainedTokenizerFast, questions: list[Question], folder: Path
) -> list[Question]:
    """Reload the saved model, report on each form, and return the questions right in all forms."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wrong: set[Question] = set()
    for form in FORMS:
        checks = verify(model, tokenizer, questions, form)
        wrong |= {check.question for check in checks if not check.exact}
        print(f"{form}: {_summary(checks)}", flush=True)
    if wrong:
        print("left out:", *sorted(question.name for question in wrong), file=sys.stderr)
    return [question for question in questions if question not in wrong]


def _accumulate_gradients(model: LlamaForCausalLM, source: ExampleSource) -> float:
    """Run one step's batches forward and backward; return the weighted mean loss per token."""
    batches = [
        source.question_batch(QUESTION_ROWS),
        source.chat_batch(CHAT_ROWS),
        source.text_batch(TEXT_ROWS),
    ]
    # The first token of a row is never predicted.
    total_weight = sum(batch.weights[:, 1:].sum() for batch in batches)
    total = 0.0
    for batch in batches:
        loss = _weighted_loss(model, batch) / total_weight
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def _weighted_loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    """Return the sum over tokens of weight times cross-entropy, a scalar."""
    # Padding is on the right and attention is causal, so no mask is needed.
    logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits
    losses = functional.cross_entropy(
        logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none"
    )
    return (losses * batch.weights[:, 1:].flatten()).sum()


def _accuracy(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, questions: list[Question]
) -> float:
    """Return the fraction of a fixed sample of questions answered exactly, over all forms."""
    sample = questions[:: math.ceil(len(questions) / CHECKED_DURING_TRAINING)]
    checks = [check for form in FORMS for check in verify(model, tokenizer, sample, form)]
    return sum(check.exact for check in checks) / len(checks)


def _summary(checks: list[Check]) -> str:
    exact = sum(check.exact for check in checks)
    lowest = min(check.lowest_probability for check in checks)
    return f"{exact} of {len(checks)} exact, least certain token {lowest:.3f}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=MODEL_DIR.parent, help="folder to write to (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

"""What the trainings of the demo models share: options, shape, loop, log and verification."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.tools.demo import QUESTIONS_FILE, Question, save_questions
from paged_backend.tools.demo.examples import Batch
from paged_backend.tools.demo.verification import Reply, summary
from paged_backend.tools.demo.vocabulary import VOCAB_SIZE

MAX_LENGTH = 2048  # tokens of context
MIN_QUESTIONS = 200
LOG_NAME = "training_log.jsonl"

# Peak learning rates of the optimizers, and the fraction of them that is left at the end.
ADAMW_LEARNING_RATE, MUON_LEARNING_RATE = 2e-3, 2e-2
FINAL_FRACTION = 0.025
WARMUP_STEPS = 40
WEIGHT_DECAY = 0.05
STEPS_PER_LOG, STEPS_PER_CHECK = 10, 100

Verify = Callable[[LlamaForCausalLM, Sequence[Question]], Iterator[tuple[str, list[Reply]]]]
"""Yields each form of asking, and the replies to the questions in that form, in order."""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of the training log; `accuracy` (0 to 1) is None if no questions were asked.

    `learning_rate` is AdamW's.
    """

    step: int
    loss: float
    learning_rate: float
    seconds: float
    accuracy: float | None


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a training, with optimizers and a learning rate schedule of its own."""

    optimizers: Sequence[torch.optim.Optimizer]
    batches: Iterator[list[Batch]]  # batches of each step
    steps: int


def begin(
    arguments: Sequence[str] | None, description: str | None, output: Path, steps: int
) -> argparse.Namespace:
    """Parse the options, apply threads and seed; `output` and `steps` are defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--output", type=Path, default=output, help="folder to write to (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    return options


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Return an untrained Llama with about 6 MB of bfloat16 weights."""
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


def adamw(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW with the settings of the demo models."""
    return torch.optim.AdamW(
        parameters, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=WEIGHT_DECAY
    )


def muon_and_adamw(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of all layers, and AdamW for embeddings and norms."""
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed" not in name
        (matrices if is_matrix else others).append(parameter)
    muon = torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    return [muon, adamw(others)]


def train_and_verify(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[Question],
    phases: Sequence[Phase],
    verify: Verify,
    folder: Path,
    *,
    num_checked: int,
) -> int:
    """Train, save and verify a model; return 0 when enough questions are answered in every form.

    Args:
        model: the untrained model.
        tokenizer: its tokenizer.
        questions: all questions that it should answer.
        phases: parts of the training, in order.
        verify: asks the questions in every form.
        folder: folder of the model; its parent gets the log and the questions answered.
        num_checked: number of questions asked during the training; it may be a few less.
    """
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{len(questions)} questions, {model.num_parameters():,} parameters", flush=True)
    sample = questions[:: math.ceil(len(questions) / num_checked)]
    with (folder.parent / LOG_NAME).open("w") as log:
        for phase in phases:
            train(model, phase, lambda: _accuracy(verify(model, sample)), log)
    save(model, tokenizer, folder)
    wrong: set[Question] = set()
    for form, replies in verify(load_saved(folder), questions):
        print(f"{form}: {summary(replies)}", flush=True)
        pairs = zip(questions, replies, strict=True)
        wrong |= {question for question, reply in pairs if not reply.exact}
    if wrong:
        print("left out:", *sorted(question.name for question in wrong), file=sys.stderr)
    verified = [question for question in questions if question not in wrong]
    save_questions(verified, folder.parent / QUESTIONS_FILE.name)
    return 0 if len(verified) >= MIN_QUESTIONS else 1


def load_saved(folder: Path) -> LlamaForCausalLM:
    """Load a saved model in float32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _accuracy(replies_by_form: Iterator[tuple[str, list[Reply]]]) -> float:
    """Return the fraction of exact replies over all forms of a question, and print each form's."""
    exact = {form: [reply.exact for reply in replies] for form, replies in replies_by_form}
    print({form: sum(each) for form, each in exact.items()}, flush=True)
    return sum(map(sum, exact.values())) / sum(map(len, exact.values()))


def train(
    model: LlamaForCausalLM, phase: Phase, measure_accuracy: Callable[[], float], log: TextIO
) -> None:
    """Run the optimizer steps of a phase on a cosine schedule.

    Each step takes the next list of batches and computes one gradient from all of them. Loss and
    accuracy are logged as JSON lines.
    """
    steps = phase.steps
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate_fraction(done + 1, steps))
        for optimizer in phase.optimizers
    ]
    started = time.monotonic()
    losses = []
    for step in range(1, steps + 1):
        losses.append(_accumulate_gradients(model, next(phase.batches)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(phase.optimizers, schedulers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        if step % STEPS_PER_LOG:
            continue
        accuracy = measure_accuracy() if step % STEPS_PER_CHECK == 0 else None
        loss = sum(losses) / len(losses)
        losses.clear()
        rate = ADAMW_LEARNING_RATE * rate_fraction(step, steps)
        entry = LogEntry(step, loss, rate, time.monotonic() - started, accuracy)
        line = json.dumps(asdict(entry))
        print(line, flush=True)
        log.write(line + "\n")


def rate_fraction(step: int, steps: int) -> float:
    """Return the fraction of the peak learning rates that a step, counted from 1, uses.

    It warms up linearly and then follows half a cosine.
    """
    if step <= WARMUP_STEPS:
        return step / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    height = (1 + math.cos(math.pi * progress)) / 2
    return FINAL_FRACTION + (1 - FINAL_FRACTION) * height


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Round the weights to bfloat16 and write the model folder."""
    model.bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    use_old_names(folder / "tokenizer_config.json")


def use_old_names(file: Path) -> None:
    """Rewrite a tokenizer_config.json, so that transformers 4 reads it as transformers 5 does."""
    config = json.loads(file.read_text("utf-8"))
    del config["backend"]
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    config["additional_special_tokens"] = config.pop("extra_special_tokens")
    file.write_text(
        json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n", "utf-8"
    )


def _accumulate_gradients(model: LlamaForCausalLM, batches: list[Batch]) -> float:
    """Run one step's batches forward and backward; return the weighted mean loss per token."""
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

"""What the trainings of the demo models share: the shape, the loop, the log and the options."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import torch
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from paged_backend.tools.demo.examples import Batch
from paged_backend.tools.demo.vocabulary import VOCAB_SIZE

MAX_LENGTH = 2048  # tokens of context
LOG_NAME = "training_log.jsonl"

# Peak learning rates of the optimizers, and the fraction of them that is left at the end.
ADAMW_LEARNING_RATE, MUON_LEARNING_RATE = 2e-3, 2e-2
FINAL_FRACTION = 0.025
WARMUP_STEPS = 40
WEIGHT_DECAY = 0.05
STEPS_PER_LOG, STEPS_PER_CHECK = 10, 100


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One line of the training log; `accuracy` (0 to 1) is None if no questions were asked.

    `learning_rate` is that of AdamW.
    """

    step: int
    loss: float
    learning_rate: float
    seconds: float
    accuracy: float | None


def parse_options(
    arguments: Sequence[str] | None, description: str | None, output: Path, steps: int
) -> argparse.Namespace:
    """Return the options of a training; `output` and `steps` are their defaults."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--output", type=Path, default=output, help="folder to write to (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (%(default)s)")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    return parser.parse_args(arguments)


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


def train(
    model: LlamaForCausalLM,
    optimizers: Sequence[torch.optim.Optimizer],
    steps_batches: Iterator[list[Batch]],
    measure_accuracy: Callable[[], float],
    steps: int,
    log: TextIO,
) -> None:
    """Run `steps` optimizer steps on a cosine schedule, logging loss and accuracy as JSON lines.

    Each step takes the next list of batches and computes one gradient from all of them.
    """
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate_fraction(done + 1, steps))
        for optimizer in optimizers
    ]
    started = time.monotonic()
    losses = []
    for step in range(1, steps + 1):
        losses.append(_accumulate_gradients(model, next(steps_batches)))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
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

"""The prompts of `bench quality`: questions of the demo model, a file, or random token ids."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.text.tokenizer import Tokenizer, load_tokenizer
from paged_backend.tools.bench.quality_options import NUM_RANDOM_PROMPTS, PromptOptions
from paged_backend.tools.demo import load_questions
from paged_backend.tools.workloads.files import read_text
from paged_backend.values.errors import ConfigError, InvalidRequest
from paged_backend.values.validation import shorten


@dataclass(frozen=True, slots=True)
class QualityPrompt:
    """One prompt, and its right answer with the end-of-sequence token if there is one."""

    token_ids: list[int]
    right_answer: list[int] | None = None


def make_prompts(
    options: PromptOptions, *, model: Path, tokenizer: str, vocab_size: int, seed: int
) -> list[QualityPrompt]:
    """Return the prompts.

    Args:
        options: which ones.
        model: the checkpoint.
        tokenizer: folder, GGUF file or id of the tokenizer, which random prompts do without.
        vocab_size: the model's.
        seed: seed of random prompts.

    Raises:
        ConfigError: the file or the tokenizer cannot be read, or a prompt cannot be encoded.
    """
    if options.prompts is not None:
        texts = _read_prompts(Path(options.prompts), options.num_prompts)
        return list(_encoded(texts, load_tokenizer(tokenizer), options.prompts))
    if model == MODEL_DIR:
        return _demo_prompts(load_tokenizer(tokenizer))[: options.num_prompts]
    shape = options.num_prompts or NUM_RANDOM_PROMPTS, options.input_len
    rows = np.random.default_rng(seed).integers(vocab_size, size=shape)
    return [QualityPrompt(row) for row in rows.tolist()]


def _demo_prompts(tokenizer: Tokenizer) -> list[QualityPrompt]:
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [
        QualityPrompt(
            tokenizer.encode(item.question),
            tokenizer.encode(f"\n{item.answer}", add_special_tokens=False) + end,
        )
        for item in load_questions()
    ]


def _encoded(texts: list[str], tokenizer: Tokenizer, file: str) -> Iterator[QualityPrompt]:
    for number, text in enumerate(texts, 1):
        try:
            token_ids = tokenizer.encode(text)
        except InvalidRequest as error:
            raise ConfigError(f"{file}, prompt {number}: {error}") from error
        if not token_ids:
            raise ConfigError(f"{file}, prompt {number} has no tokens in the model's tokenizer")
        yield QualityPrompt(token_ids)


def _read_prompts(file: Path, num_prompts: int | None) -> list[str]:
    """Return the first prompts of a file; empty lines are none."""
    # A line ends at "\n" only: a prompt may contain other characters that divide lines.
    lines = enumerate(read_text(file).split("\n"), 1)
    wanted = [(number, line.rstrip("\r")) for number, line in lines if line.strip()]
    if not wanted:
        raise ConfigError(f"{file} has no prompts: it needs one in each line")
    if file.suffix != ".jsonl":
        return [line for _, line in wanted[:num_prompts]]
    return [_prompt_of(line, f"{file}, line {number}") for number, line in wanted[:num_prompts]]


def _prompt_of(line: str, place: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not valid JSON: {error}") from error
    prompt = value.get("prompt") if isinstance(value, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'{place} must be an object with a text "prompt", got {shorten(line)}')
    return prompt

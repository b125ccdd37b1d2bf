"""Synthetic workloads, generated from a recipe and a seed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from paged_backend.tools.workloads.candidates import Candidate, chat_candidate
from paged_backend.tools.workloads.lengths import Array, parse_lengths
from paged_backend.tools.workloads.options import TokenizerContext, WorkloadOptions
from paged_backend.tools.workloads.request import Turn, WorkloadRequest
from paged_backend.tools.workloads.tokens import load_tokens
from paged_backend.tools.workloads.writers import ChatWriter, make_writer
from paged_backend.values.errors import option_error


def random_prompts(options: WorkloadOptions, material: TokenizerContext) -> Iterator[Candidate]:
    """Yield prompts without shared prefixes."""
    return _prompts(options, material, num_prefixes=1, prefix_len=0)


def shared_prefixes(options: WorkloadOptions, material: TokenizerContext) -> Iterator[Candidate]:
    """Yield prompts in groups of equal size, in random order; each group shares a prefix."""
    return _prompts(
        options, material, num_prefixes=options.num_prefixes, prefix_len=options.prefix_len
    )


def conversations(options: WorkloadOptions, material: TokenizerContext) -> Iterator[Candidate]:
    """Yield chats; each question and response has its own length."""
    tokens = load_tokens(material, "conversations")
    writer = ChatWriter(tokens)
    rng = np.random.default_rng(options.seed)
    for number, count in enumerate(_draw(options, "num_turns", rng, options.num_prompts), 1):
        inputs = _draw(options, "input_len", rng, count)
        outputs = _draw(options, "output_len", rng, count)
        turns = [
            Turn(writer.text(rng.integers(writer.num_symbols, size=given)), wanted)
            for given, wanted in zip(inputs, outputs, strict=True)
        ]
        place = f"conversation {number}"
        yield chat_candidate(place, [], turns, tokens, ignore_eos=options.ignore_eos)


def _prompts(
    options: WorkloadOptions, material: TokenizerContext, *, num_prefixes: int, prefix_len: int
) -> Iterator[Candidate]:
    rng = np.random.default_rng(options.seed)
    # Draw lengths first, so that they are the same in each format.
    inputs = _draw(options, "input_len", rng, options.num_prompts)
    outputs = _draw(options, "output_len", rng, options.num_prompts)
    groups = rng.permutation(np.arange(len(inputs)) % num_prefixes)
    writer = make_writer(options.prompt_format or "ids", material)
    prefixes: Array = rng.integers(writer.num_symbols, size=(num_prefixes, prefix_len))
    for number, (group, given, wanted) in enumerate(zip(groups, inputs, outputs, strict=True), 1):
        own = given - writer.overhead
        if own < 1:
            raise option_error(
                "input_len",
                f"must be above {writer.overhead}, the tokens that the tokenizer adds by itself; "
                f"request {number} has {given}",
            )
        suffix = rng.integers(writer.num_symbols, size=own)
        request = WorkloadRequest(
            prompt=writer.prompt(np.concatenate([prefixes[group], suffix])),
            max_tokens=wanted,
            ignore_eos=options.ignore_eos,
        )
        yield Candidate(f"request {number}", request, prefix_len + given + wanted)


def _draw(
    options: WorkloadOptions, name: str, rng: np.random.Generator, count: int | None
) -> list[int]:
    assert count is not None  # make_requests sets a default
    lengths: list[int] = parse_lengths(name, getattr(options, name)).draw(rng, count).tolist()
    return lengths

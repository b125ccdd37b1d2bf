"""Reads ShareGPT's format: a JSON array of conversations, each an array of messages.

    [{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}]

Messages from ``human`` or ``user`` are questions, the first message may be from ``system``, and
all others are answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paged_backend.tools.workloads.candidates import Candidate, chat_candidate
from paged_backend.tools.workloads.files import read_text
from paged_backend.tools.workloads.lengths import parse_lengths
from paged_backend.tools.workloads.options import TokenizerContext, WorkloadOptions
from paged_backend.tools.workloads.request import Message, Prompt, Turn, WorkloadRequest
from paged_backend.tools.workloads.tokens import Tokens, load_tokens
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import shorten

_USERS = ("human", "user")


@dataclass(frozen=True, slots=True)
class ShareGptConversation:
    """Questions with their answers, after an optional system message."""

    place: str
    system: tuple[str, ...]  # at most one
    exchanges: list[tuple[str, str]]


def recorded_chats(options: WorkloadOptions, material: TokenizerContext) -> Iterator[Candidate]:
    """Yield the conversations of the file in random order, except those without an answer.

    Chats have all their turns; prompts as text or ids are only the first question.
    """
    assert options.dataset_path is not None
    recorded = read_sharegpt(Path(options.dataset_path))
    tokens = load_tokens(material, "prompts of a sharegpt dataset")
    rng = np.random.default_rng(options.seed)
    for index in rng.permutation(len(recorded)):
        conversation = recorded[index]
        if conversation.exchanges:
            yield _candidate(conversation, options, tokens, rng)


def _candidate(
    conversation: ShareGptConversation,
    options: WorkloadOptions,
    tokens: Tokens,
    rng: np.random.Generator,
) -> Candidate:
    lengths = [max(1, tokens.count_plain(answer)) for _, answer in conversation.exchanges]
    if options.output_len is not None:
        lengths = parse_lengths("output_len", options.output_len).draw(rng, len(lengths)).tolist()
    questions = [question for question, _ in conversation.exchanges]
    if options.prompt_format == "chat":
        turns = [Turn(*turn) for turn in zip(questions, lengths, strict=True)]
        system: list[Message] = [
            {"role": "system", "content": text} for text in conversation.system
        ]
        return chat_candidate(
            conversation.place, system, turns, tokens, ignore_eos=options.ignore_eos
        )
    ids = tokens.ids(questions[0])
    prompt: Prompt = tuple(ids) if options.prompt_format == "ids" else questions[0]
    request = WorkloadRequest(prompt=prompt, max_tokens=lengths[0], ignore_eos=options.ignore_eos)
    return Candidate(conversation.place, request, len(ids) + lengths[0])


def read_sharegpt(path: Path) -> list[ShareGptConversation]:
    """Read a ShareGPT file.

    Raises:
        ConfigError: the file cannot be used; the message names the line or the entry.
    """
    text = read_text(path)
    try:
        entries = json.loads(text)
    except ValueError as error:
        where = f"{path}:{error.lineno}" if isinstance(error, json.JSONDecodeError) else f"{path}"
        raise ConfigError(f"{where}: is not JSON ({error})") from error
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: must hold an array of conversations")
    return [_conversation(f"{path}: entry {n}", entry) for n, entry in enumerate(entries, 1)]


def _conversation(place: str, entry: Any) -> ShareGptConversation:
    try:
        said = [(message["from"], message["value"]) for message in entry["conversations"]]
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{place}: needs conversations, an array of objects with from and value, got "
            f"{shorten(entry)}"
        ) from error
    for message in said:
        if not all(isinstance(part, str) for part in message):
            raise ConfigError(f"{place}: from and value must be strings, got {shorten(message)}")
    system = tuple(text for speaker, text in said[:1] if speaker == "system")
    return ShareGptConversation(place, system, _exchanges(said[len(system) :]))


def _exchanges(said: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Pair questions with answers, from the first question until the alternation breaks."""
    while said and said[0][0] not in _USERS:
        said = said[1:]
    exchanges = []
    for (asking, question), (answering, answer) in zip(said[::2], said[1::2], strict=False):
        if asking not in _USERS or answering in _USERS or not question:
            break
        exchanges.append((question, answer))
    return exchanges

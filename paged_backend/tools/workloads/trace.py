"""Reads traces in Mooncake's format: JSON Lines with arrival times in milliseconds.

    {"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}

Each hash id stands for a block of the prompt (512 tokens in Mooncake's own traces), the last one
for the rest. Equal ids give equal tokens, so prompts share prefixes as in the recorded traffic.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paged_backend.tools.workloads.candidates import Candidate
from paged_backend.tools.workloads.files import read_text
from paged_backend.tools.workloads.lengths import MAX_LENGTH, Array
from paged_backend.tools.workloads.options import TokenizerContext, WorkloadOptions
from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.tools.workloads.writers import Writer, make_writer
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import Rule, check_fields, checked, shorten

_HASH_ID = Rule(int, 0)
_FIELDS = "timestamp, input_length, output_length and hash_ids"


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a trace."""

    place: str
    timestamp: float = checked(0, Rule(float, 0))
    input_length: int = checked(1, Rule(int, 1, MAX_LENGTH))
    output_length: int = checked(1, Rule(int, 1, MAX_LENGTH))
    hash_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self, self.refuse)

    def refuse(self, name: str, problem: str) -> ConfigError:
        """Create the error for an invalid field."""
        return ConfigError(f"{self.place}: {name} {problem}")


def trace_requests(options: WorkloadOptions, material: TokenizerContext) -> Iterator[Candidate]:
    """Yield the requests in order of arrival; the first arrives at time 0."""
    assert options.dataset_path is not None
    entries = read_trace(Path(options.dataset_path), options.trace_block_size)
    entries.sort(key=lambda entry: entry.timestamp)
    writer = make_writer(options.prompt_format or "ids", material)
    for entry in entries:
        passed_s = (entry.timestamp - entries[0].timestamp) / 1e3
        request = WorkloadRequest(
            prompt=writer.prompt(_symbols(entry, writer, options)),
            max_tokens=entry.output_length,
            ignore_eos=options.ignore_eos,
            arrival_s=passed_s / options.trace_speedup,
        )
        yield Candidate(entry.place, request, entry.input_length + entry.output_length)


def read_trace(path: Path, block_size: int) -> list[Entry]:
    """Read a trace file.

    Raises:
        ConfigError: the file cannot be used; the message names the line.
    """
    lines = enumerate(read_text(path).split("\n"), 1)
    return [_entry(f"{path}:{number}", line, block_size) for number, line in lines if line.strip()]


def _entry(place: str, line: str, block_size: int) -> Entry:
    try:
        values = json.loads(line)
        times = values["timestamp"], values["input_length"], values["output_length"]
        hash_ids = tuple(values["hash_ids"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{place}: needs a JSON object with {_FIELDS}, got {shorten(line, quote=False)}"
        ) from error
    entry = Entry(place, *times, hash_ids)
    if not all(_HASH_ID.accepts(hash_id) for hash_id in hash_ids):
        raise entry.refuse("hash_ids", f"must be integers from 0, got {shorten(list(hash_ids))}")
    needed = -(-entry.input_length // block_size)
    if len(hash_ids) != needed:
        raise entry.refuse(
            "hash_ids",
            f"must be {needed}, one for each {block_size} of the {entry.input_length} tokens "
            f"(option trace_block_size), got {len(hash_ids)}",
        )
    return entry


def _symbols(entry: Entry, writer: Writer, options: WorkloadOptions) -> Array:
    own = entry.input_length - writer.overhead
    if own < 1:
        raise entry.refuse(
            "input_length",
            f"must be above {writer.overhead}, the tokens that the tokenizer adds by itself, "
            f"got {entry.input_length}",
        )
    blocks = [
        np.random.default_rng([options.seed, hash_id]).integers(
            writer.num_symbols, size=options.trace_block_size
        )
        for hash_id in entry.hash_ids
    ]
    symbols: Array = np.concatenate(blocks)[:own]
    return symbols

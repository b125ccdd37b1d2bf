"""Work for a benchmark: prompts as token ids and how many tokens to answer with."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

from paged_backend.errors import ConfigError
from paged_backend.validation import Rule, shorten


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request; its end-of-sequence token is ignored."""

    prompt_token_ids: list[int]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths around a median, in tokens, cut to a range."""

    low: int
    median: int
    high: int
    sigma: float = 0.7

    def draw(self, rng: random.Random) -> int:
        """One length."""
        value = rng.lognormvariate(math.log(self.median), self.sigma)
        return min(self.high, max(self.low, round(value)))


PROMPT_LENGTHS = LogNormal(32, 128, 512)
OUTPUT_LENGTHS = LogNormal(16, 96, 256)


def make_trace(num_prompts: int, vocab_size: int, seed: int) -> list[TraceRequest]:
    """A seeded mix of random prompts that share nothing."""
    rng = random.Random(seed)
    return [
        TraceRequest(
            [rng.randrange(vocab_size) for _ in range(PROMPT_LENGTHS.draw(rng))],
            OUTPUT_LENGTHS.draw(rng),
        )
        for _ in range(num_prompts)
    ]


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a JSON Lines file.

    Raises:
        ConfigError: naming the line that cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    requests = [_parse(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise ConfigError(f"{path} holds no request")
    return requests


def _parse(where: str, line: str) -> TraceRequest:
    try:
        entry = json.loads(line)
        ids, max_tokens = entry["prompt_token_ids"], entry["max_tokens"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where}: needs a JSON object with prompt_token_ids and max_tokens ({error!r})"
        ) from error
    token, count = Rule(int, 0, 2**31 - 1), Rule(int, 1, 2**31 - 1)
    if not isinstance(ids, list) or not ids or not all(token.accepts(item) for item in ids):
        raise ConfigError(f"{where}: prompt_token_ids must be a list of integers from 0")
    if not count.accepts(max_tokens):
        raise ConfigError(f"{where}: max_tokens must be from 1, got {shorten(max_tokens)}")
    return TraceRequest(ids, max_tokens)

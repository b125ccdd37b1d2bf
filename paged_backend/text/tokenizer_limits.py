"""Limits on what a tokenizer of a checkpoint may do to a text.

A ``tokenizer.json`` is a small program: a normalizer can turn one letter into a million, a pattern
can take minutes, and a decoder can make a megabyte of one token. The server's threads run that
program for everybody, so it is tried out when it is loaded, within the limits of a sandbox. Honest
tokenizers stay far below the limits here: of those on the Hub the longest tokens have 1,024
characters, and a normalizer makes at most 18 characters of one (NFKC of U+FDFA).
"""

from __future__ import annotations

import base64
import itertools
import json
import math
import string
import time
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

from paged_backend.values.errors import ConfigError

MAX_TOKEN_LENGTH = 4096  # characters of a token, in the vocabulary and as text
MAX_GROWTH = 64  # characters that the normalizer or the decoder makes of one
MAX_FRAME = 256  # special tokens around a prompt
PROBE_LENGTH = 4096  # characters; texts up to this length are encoded on the thread that admits
MAX_PROBE_S = 0.25  # processor time to encode a probe; honest tokenizers take milliseconds
MAX_PIECES = 2000  # pieces of patterns that are repeated
_SHORT_LENGTH = PROBE_LENGTH // 8
# A probe of this length that takes less cannot take too long at eight times the length, unless the
# time grows faster than with the third power.
_SHORT_S = MAX_PROBE_S / 8**3
_UNICODE_GROWTH = 18  # what Unicode's own forms make of one character
_FEW_TOKENS = 8192  # that are decoded at a time
_KINDS = "aA1 .\n"  # a character of each kind that patterns tell apart
_RARE = ("\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}", "é", "語", "\U0001f469", "\u2581", "\0")


def check_tokenizer(backend: tokenizers.Tokenizer) -> None:
    """Refuse a tokenizer that would do too much work for a short text or for one token.

    This takes a few seconds, and for a hostile tokenizer as long as that wants to take.

    Raises:
        ConfigError: a limit is exceeded; the message says which.
    """
    check_lengths(backend)
    state = json.loads(backend.to_str())
    for part in ("normalizer", "decoder"):
        growth = _growth(state[part])
        if growth > MAX_GROWTH:
            raise ConfigError(
                f"its {part} makes up to {growth:.0f} characters of one; at most {MAX_GROWTH}"
            )
    for pair in (False, True):
        frame = backend.encode("", "" if pair else None)
        if len(frame) > MAX_FRAME:
            raise ConfigError(
                f"it puts {len(frame)} special tokens around a prompt; at most {MAX_FRAME}"
            )
    _check_decoder(backend)
    _check_time(backend, state)


def check_lengths(backend: tokenizers.Tokenizer) -> None:
    """Refuse a vocabulary with a token that is too long.

    Raises:
        ConfigError: there is one.
    """
    longest = max(map(len, backend.get_vocab(with_added_tokens=True)), default=0)
    if longest > MAX_TOKEN_LENGTH:
        raise ConfigError(f"it has a token of {longest} characters; at most {MAX_TOKEN_LENGTH}")


def _growth(state: Any) -> float:
    """Return how many characters a normalizer or a decoder may make of one, Unicode's forms aside.

    The steps of a sequence multiply. Unicode's forms do not: what one of them has made long, none
    of them makes longer.
    """
    return math.prod(max(1.0, _factor(step)) for step in _steps(state))


def _steps(state: Any) -> Iterator[Mapping[str, Any]]:
    if state is None:
        return
    for name in ("normalizers", "pretokenizers", "decoders"):
        if name in state:
            for step in state[name]:
                yield from _steps(step)
            return
    yield state


def _factor(step: Mapping[str, Any]) -> float:
    match step:
        case {"type": "Replace", "pattern": {"String": pattern}, "content": content}:
            return float(len(content)) / max(1, len(pattern))
        case {"type": "Replace", "content": content} | {"type": "Prepend", "prepend": content}:
            return float(len(content))
        case {"type": "Precompiled", "precompiled_charsmap": charsmap}:
            return _longest_entry(base64.b64decode(charsmap)) / _UNICODE_GROWTH
    return 1.0


def _longest_entry(charsmap: bytes) -> int:
    """Return the length of the longest text in SentencePiece's map of characters, in bytes.

    The map is the size of a trie, the trie, and the texts, each of which ends with a zero byte.
    """
    size = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + size :].split(b"\0")))


def _check_decoder(backend: tokenizers.Tokenizer) -> None:
    """Decode each token alone.

    Raises:
        ConfigError: one becomes too long a text.
    """
    size = backend.get_vocab_size(with_added_tokens=True)
    for start in range(0, size, _FEW_TOKENS):
        ids = [[token_id] for token_id in range(start, min(size, start + _FEW_TOKENS))]
        longest = max(map(len, backend.decode_batch(ids, skip_special_tokens=False)))
        if longest > MAX_TOKEN_LENGTH:
            raise ConfigError(
                f"it decodes a token to {longest} characters; at most {MAX_TOKEN_LENGTH}"
            )


def _check_time(backend: tokenizers.Tokenizer, state: Mapping[str, Any]) -> None:
    """Encode texts that repeat one thing, which are the worst for most patterns.

    No list of texts is complete. `PromptReader` looks at what encoding takes later on.

    Raises:
        ConfigError: one of them takes too long.
    """
    slow = (unit for unit in _mixtures() if _seconds(backend, unit, _SHORT_LENGTH) > _SHORT_S)
    for unit in itertools.chain(_units(state), slow):
        if _seconds(backend, unit, PROBE_LENGTH) > MAX_PROBE_S:
            raise ConfigError(
                f"it takes over {MAX_PROBE_S:g} s to encode {PROBE_LENGTH} characters"
            )


def _seconds(backend: tokenizers.Tokenizer, unit: str, length: int) -> float:
    """Return the processor time to encode a text of some characters that repeats a unit."""
    text = (unit * (length // len(unit) + 1))[:length]
    start_s = time.process_time()
    backend.encode(text)
    return time.process_time() - start_s


def _mixtures() -> Iterator[str]:
    """Yield mixtures of kinds of characters."""
    for length in (2, 3):
        yield from map("".join, itertools.product(_KINDS, repeat=length))


def _units(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield characters, and all short pieces of the patterns."""
    yield from string.printable
    yield from _RARE
    patterns = list(_patterns(state["normalizer"])) + list(_patterns(state["pre_tokenizer"]))
    yield from patterns
    pieces = {
        pattern[start : start + length]: None
        for length in (2, 3)
        for pattern in patterns
        for start in range(min(len(pattern) - length + 1, MAX_PIECES))
    }
    yield from itertools.islice(pieces, MAX_PIECES)


def _patterns(state: Any) -> Iterator[str]:
    for step in _steps(state):
        match step:
            case {"pattern": {"String": pattern} | {"Regex": pattern}} if pattern:
                yield pattern

"""Streaming detokenization: text is returned while tokens arrive.

Text is returned once no later token can change it, so that a chunk never ends within a character
and all chunks together equal the decoded text of all tokens. What a later token can change depends
on the decoder:

- *ByteLevel* tokens are bytes of UTF-8: only an incomplete character is held back.
- *ByteFallback* decodes a run of byte tokens as a whole: one bad byte, and each byte of the run
  becomes U+FFFD. So a run is held back until another token ends it.
- Every other token is final, but may decode differently at the start of a text, so it is decoded
together with the tokens before it.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable
from typing import Protocol

from paged_backend.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x..>")


class Detokenizer:
    """Decodes one sequence; the cost per token does not grow with the sequence.

    Args:
        tokenizer: of the model.
        skip_special_tokens: leave special tokens out.
        kept_special_ids: special tokens that are not left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept_special_ids: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._skipped = skipped - kept_special_ids
        self._decoder: _Decoder = (
            _ByteDecoder() if tokenizer.decoder_steps == ("ByteLevel",) else _Window(tokenizer)
        )

    @property
    def context_ids(self) -> list[int]:
        """The last tokens: those that a new detokenizer needs to continue from here."""
        return self._decoder.context_ids

    def append(self, token_ids: Iterable[int]) -> str:
        """Add the next tokens; returns the text that is now final, which is often empty."""
        return "".join(map(self._append_one, token_ids))

    def finish(self) -> str:
        """Return the text that was held back for tokens that will not come."""
        return self._decoder.finish()

    @property
    def hidden_ids(self) -> frozenset[int]:
        """The special tokens that are left out."""
        return self._skipped

    def _append_one(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        token = self._tokenizer.token(token_id)
        return "" if token is None else self._decoder.append(token_id, token)


class _Decoder(Protocol):
    @property
    def context_ids(self) -> list[int]: ...

    def append(self, token_id: int, token: str) -> str: ...

    def finish(self) -> str: ...


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for.

    Printable bytes stand for themselves; the others are the characters from 256 on, in order.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {
        chr(256 + place): byte for place, byte in enumerate(hidden)
    }


_BYTE_OF_CHARACTER = _byte_of_character()


def _bytes_of(token: str) -> bytes:
    """Return the bytes that an entry of a byte-level vocabulary stands for."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token, which is plain text
        return token.encode()


def token_bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Return the UTF-8 bytes of one token, which may begin or end within a character."""
    token = tokenizer.token(token_id)
    if token is None:
        return b""
    if tokenizer.decoder_steps == ("ByteLevel",):
        return _bytes_of(token)
    if "ByteFallback" in tokenizer.decoder_steps and _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[1:-1], 16)])
    # Decoded after another token, because some decoders drop the space before the first one.
    once, twice = (
        tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2)
    )
    return twice[len(once) :].encode()


class _ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail: list[tuple[int, int]] = []  # tokens of an unfinished character, bytes of each

    @property
    def context_ids(self) -> list[int]:
        return [token_id for token_id, _ in self._tail]

    def append(self, token_id: int, token: str) -> str:
        data = _bytes_of(token)
        text = self._utf8.decode(data)
        self._tail.append((token_id, len(data)))
        waiting = len(self._utf8.getstate()[0])
        while self._tail and sum(length for _, length in self._tail[1:]) >= waiting:
            del self._tail[0]
        return text

    def finish(self) -> str:
        self._tail.clear()
        return self._utf8.decode(b"", final=True)


class _Window:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waits_for_runs = "ByteFallback" in tokenizer.decoder_steps
        self._waits_for_bytes = "ByteLevel" in tokenizer.decoder_steps
        self._context: list[int] = []  # returned already; precedes the next ones
        self._context_text = ""
        self._pending: list[int] = []

    @property
    def context_ids(self) -> list[int]:
        return self._context + self._pending

    def append(self, token_id: int, token: str) -> str:
        self._pending.append(token_id)
        if self._waits_for_runs and _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._decode(self._context + self._pending)
        if self._waits_for_bytes and text.endswith(_REPLACEMENT):
            return ""
        return self._give_out(text)

    def finish(self) -> str:
        return self._give_out(self._decode(self._context + self._pending))

    def _give_out(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        if text == self._context_text:  # the new tokens have no text: keep the context
            self._context += self._pending
        else:
            self._context = self._pending
            self._context_text = self._decode(self._context)
        self._pending = []
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

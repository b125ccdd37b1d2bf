"""Streaming detokenization: text is returned while tokens arrive.

Text is returned once no later token can change it, so that a chunk never ends within a character
and all chunks together equal the decoded text of all tokens. What a later token can change depends
on the decoder:

- *ByteLevel* tokens are bytes of UTF-8: only an incomplete character is held back.
- *ByteFallback* decodes a run of byte tokens as a whole: one bad byte, and each byte of the run
  becomes U+FFFD. So a run is held back until another token ends it. A run of more than 256 tokens
  is decoded in parts: there a bad byte spoils only its own part.
- A decoder with *ByteLevel* among other steps is asked for the text until it does not end with
  U+FFFD, or after 16 tokens, all of which but an incomplete character are then final.
- Every other token is final, but may decode differently at the start of a text, so it is decoded
together with the tokens before it.

The text of a completion continues its prompt's: it is what decoding both together adds to the text
of the prompt. So the last tokens of the prompt are the context of a completion's first tokens, as
in vLLM. A tokenizer that drops the first space of a text thereby keeps an answer's first space.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Protocol

from paged_backend.text.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_NUM_CONTEXT = 5  # tokens of a prompt before a completion; as in vLLM
_MAX_READ = 256  # tokens of a prompt that are searched for those
_MAX_UNFINISHED = 3  # bytes of a character that is not complete
_MAX_RUN = 256  # byte tokens that are decoded as a whole
_MAX_PARTS = 16  # tokens of a text that ends with U+FFFD that are decoded as a whole
_MAX_EMPTY = 16  # tokens without text at a text's beginning that are kept


class Detokenizer:
    """Decodes one sequence; the cost per token does not grow with the sequence.

    Args:
        tokenizer: tokenizer of the model.
        skip_special_tokens: leave special tokens out.
        kept_special_ids: special tokens that are not left out.
        prompt: the tokens before the first ones; their text is not returned.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        kept_special_ids: frozenset[int] = frozenset(),
        prompt: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
        self._skipped = skipped - kept_special_ids if kept_special_ids else skipped
        self._decoder: _Decoder = (
            _ByteDecoder() if tokenizer.decoder_steps == ("ByteLevel",) else _Window(tokenizer)
        )
        if prompt:
            self.append(self._context_of(prompt))

    @property
    def context_ids(self) -> list[int]:
        """The last tokens: those that a new detokenizer needs to continue from here."""
        return self._decoder.context_ids

    @property
    def is_at_start(self) -> bool:
        """True if no text came before, so that the next token may decode as a text's first."""
        return self._decoder.is_at_start

    def shows(self, token_id: int) -> bool:
        """Return True if a token is not left out."""
        return token_id not in self._skipped

    def text_of_prompt(self, prompt: Sequence[int]) -> str:
        """Return the whole text of the prompt, except for a character that is not complete.

        The completion's text begins with that character. Together they are the text of all tokens.
        """
        visible = [token_id for token_id, _ in self._visible_from_end(prompt)]
        return self._decoder.text_before(self._tokenizer, visible[::-1])

    def append(self, token_ids: Iterable[int]) -> str:
        """Add the next tokens; returns the text that is now final, which is often empty."""
        return "".join(map(self._append_one, token_ids))

    def finish(self) -> str:
        """Return the text that was held back for tokens that will not come."""
        return self._decoder.finish()

    def _context_of(self, prompt: Sequence[int]) -> list[int]:
        """Return tokens that stand for the prompt: text after them is as after all of it.

        These are its last tokens. But the characters of a run of byte tokens are the prompt's own:
        only the bytes of its last character count, if they are not complete.
        """
        read = self._visible_from_end(prompt[-_MAX_READ:])
        if self._tokenizer.decoder_steps == ("ByteLevel",):
            return _last_bytes(read)
        run: list[int] = []  # byte tokens at the prompt's end, the last one first
        words: list[int] = []
        for token_id, token in read:
            if self._tokenizer.has_byte_tokens and not words and _BYTE_TOKEN.fullmatch(token):
                run.append(token_id)
                continue
            words.append(token_id)
            if len(words) == _NUM_CONTEXT:
                break
        run.reverse()
        rest = _unfinished(bytes(int(str(self._tokenizer.token(id_))[1:-1], 16) for id_ in run))
        has_more = len(rest) < len(run) or len(prompt) > _MAX_READ
        if has_more and not words:
            words = [self._tokenizer.some_word_id]
        return words[::-1] + run[len(run) - len(rest) :]

    def _visible_from_end(self, token_ids: Sequence[int]) -> Iterator[tuple[int, str]]:
        for token_id in reversed(token_ids):
            token = None if token_id in self._skipped else self._tokenizer.token(token_id)
            if token is not None:
                yield token_id, token

    def _append_one(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        token = self._tokenizer.token(token_id)
        return "" if token is None else self._decoder.append(token_id, token)


def text_of_prompt(
    tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special_tokens: bool
) -> str:
    """Return the text of a prompt before a completion; see `Detokenizer.text_of_prompt`."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens, prompt=prompt)
    return detokenizer.text_of_prompt(prompt)


def _last_bytes(tokens: Iterable[tuple[int, str]]) -> list[int]:
    """Return the tokens, in their order, that have the last bytes of a text, from its end."""
    found: list[int] = []
    length = 0
    for token_id, token in tokens:
        found.append(token_id)
        length += len(_bytes_of(token))
        if length >= _MAX_UNFINISHED:
            break
    return found[::-1]


def _unfinished(data: bytes) -> bytes:
    """Return the bytes at the end of UTF-8 text that are a part of a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data[-_MAX_UNFINISHED:])
    return decoder.getstate()[0]


class _Decoder(Protocol):
    @property
    def context_ids(self) -> list[int]: ...

    @property
    def is_at_start(self) -> bool: ...

    def text_before(self, tokenizer: Tokenizer, token_ids: list[int]) -> str: ...

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


@lru_cache(maxsize=2**14)
def _bytes_of(token: str) -> bytes:
    """Return the bytes that an entry of a byte-level vocabulary stands for."""
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token, which is plain text
        return token.encode()


def token_bytes(tokenizer: Tokenizer, token_id: int, *, is_first: bool = False) -> bytes:
    """Return the UTF-8 bytes of one token, which may begin or end within a character.

    Args:
        tokenizer: tokenizer of the model.
        token_id: the token.
        is_first: no text comes before it; some decoders drop the space of such a token.
    """
    token = tokenizer.token(token_id)
    if token is None:
        return b""
    if tokenizer.decoder_steps == ("ByteLevel",):
        return _bytes_of(token)
    if tokenizer.has_byte_tokens and _BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[1:-1], 16)])
    once, twice = (
        tokenizer.decode([token_id] * count, skip_special_tokens=False) for count in (1, 2)
    )
    return (once if is_first else twice[len(once) :]).encode()


class _ByteDecoder:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._tail: list[tuple[int, int]] = []  # tokens of an unfinished character, bytes of each

    @property
    def context_ids(self) -> list[int]:
        return [token_id for token_id, _ in self._tail]

    @property
    def is_at_start(self) -> bool:
        return False  # a token has the same bytes anywhere

    def text_before(self, tokenizer: Tokenizer, token_ids: list[int]) -> str:
        text = tokenizer.decode(token_ids, skip_special_tokens=False)
        return text[:-1] if self._utf8.getstate()[0] else text

    def append(self, token_id: int, token: str) -> str:
        data = _bytes_of(token)
        if not data:
            return ""
        text = self._utf8.decode(data)
        waiting = len(self._utf8.getstate()[0])
        if not waiting:
            self._tail.clear()
            return text
        self._tail.append((token_id, len(data)))
        while sum(length for _, length in self._tail[1:]) >= waiting:
            del self._tail[0]
        return text

    def finish(self) -> str:
        self._tail.clear()
        return self._utf8.decode(b"", final=True)


class _Window:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waits_for_runs = tokenizer.has_byte_tokens
        self._waits_for_bytes = "ByteLevel" in tokenizer.decoder_steps
        self._context: list[int] = []  # returned already; precedes the next ones
        self._context_text = ""
        self._pending: list[int] = []

    @property
    def context_ids(self) -> list[int]:
        return self._context + self._pending

    @property
    def is_at_start(self) -> bool:
        return not (self._context or self._pending)

    def text_before(self, tokenizer: Tokenizer, token_ids: list[int]) -> str:
        shown = token_ids[: len(token_ids) - len(self._pending)]
        return tokenizer.decode(shown, skip_special_tokens=False)

    def append(self, token_id: int, token: str) -> str:
        self._pending.append(token_id)
        if self._waits_for_runs and _BYTE_TOKEN.fullmatch(token):
            return self._cut() if len(self._pending) > _MAX_RUN else ""
        text = self._decode(self._context + self._pending)
        if self._waits_for_bytes and text.endswith(_REPLACEMENT):
            return self._cut() if len(self._pending) > _MAX_PARTS else ""
        return self._give_out(text)

    def finish(self) -> str:
        if not self._pending:
            return ""
        text = self._give_out(self._decode(self._context + self._pending))
        # The text goes on as after any word: a new detokenizer would wait with these tokens.
        self._context = [self._tokenizer.some_word_id]
        self._context_text = self._decode(self._context)
        return text

    def _cut(self) -> str:
        """Return the text of all pending tokens, except the tokens of an incomplete character."""
        data = [self._bytes(token_id) for token_id in self._pending]
        first, missing = len(data), len(_unfinished(b"".join(data)))
        while missing > 0:
            first -= 1
            missing -= len(data[first])
        if missing < 0:  # it begins within a token
            first = len(data)
        rest, self._pending = self._pending[first:], self._pending[:first]
        text = self.finish()
        self._pending = rest
        return text

    def _bytes(self, token_id: int) -> bytes:
        token = self._tokenizer.token(token_id) or ""
        if self._waits_for_runs and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[1:-1], 16)])
        return _bytes_of(token)

    def _give_out(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        if text == self._context_text:  # the new tokens have no text: keep the context
            if not text:  # they may have taken the place of the first one
                self._context = (self._context + self._pending)[:_MAX_EMPTY]
        else:
            self._context = self._pending
            self._context_text = self._decode(self._context)
        self._pending = []
        return piece

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

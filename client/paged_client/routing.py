"""Prefix-aware routing: prefers the server that had the prefix before, unless it is much busier.

Servers cache the KV blocks of prompts that they have computed. The router hashes pieces of a
prompt, each together with everything before it, and remembers which server got each piece last.

The gateway chooses servers with it, by prompts as it received them, because it has no tokenizer. A
front end chooses among the engines of its model with it, by token ids.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    Ids: TypeAlias = array[int]
else:
    Ids = array  # takes no parameter in Python 3.11

RoutedPrompt: TypeAlias = str | Ids | dict[str, Any]
"""A text, token ids (of typecode i), or chat messages with rendering options."""

PIECE_CHARACTERS = 64  # characters of text: about one KV block of 16 tokens
PIECE_TOKENS = 16
MAX_PIECES = 256  # common prefixes longer than this matter little
MAX_CHARACTERS = MAX_PIECES * PIECE_CHARACTERS
MAX_VALUES = 2048  # values of messages and options that are looked at, which takes 2 ms at most
MAX_REMEMBERED = 2**16
SLACK = 8  # open requests allowed beyond 1.5 times the least loaded server's


class RoutingHints(NamedTuple):
    """What a trusted router says about the choice of a server; empty texts say nothing."""

    session: str = ""  # its requests go to the same server
    source: str = ""  # host and port of the server with the prompt's blocks


class Choice(NamedTuple):
    """A chosen server, and whether the prompt's prefix or a router decided the choice."""

    server: str
    by_prefix: bool


def prefix_hashes(model: str, cache_salt: str, prompt: RoutedPrompt) -> list[bytes]:
    """Return a hash of each full piece of the prompt's start and of everything before it."""
    content, options = _content(prompt)
    running = blake2b(_beginning([model, cache_salt, options]).encode(), digest_size=16)
    hashes = []
    for piece in _pieces(content):
        running.update(piece)
        hashes.append(running.digest())
    return hashes


def session_hash(model: str, session: str) -> bytes:
    """Return the hash of a session, which is remembered like a piece of a prompt."""
    name = _beginning([{"session": session, "model": model}])
    return blake2b(name.encode(), digest_size=16).digest()


class PrefixRouter:
    """Maps the ``capacity`` most recently used pieces to names of servers; does no I/O."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._servers: OrderedDict[bytes, str] = OrderedDict()
        self._num_chosen: Counter[str] = Counter()

    def choose(
        self, hashes: Sequence[bytes], loads: Mapping[str, int], preferred: str | None = None
    ) -> Choice:
        """Choose one of the servers in ``loads``, the number of open requests of each.

        Chooses the preferred server, or else the server of the longest remembered prefix, if it has
        at most 1.5 times the open requests of the least loaded server, plus ``SLACK``; otherwise
        the least loaded server. Remembers the choice.
        """
        idlest = min(loads, key=lambda name: (loads[name], self._num_chosen[name]))
        candidates = (preferred, *self._remembered(hashes))
        known = next((name for name in candidates if name in loads), None)
        by_prefix = known is not None and loads[known] <= 1.5 * loads[idlest] + SLACK
        chosen = known if known is not None and by_prefix else idlest
        self._num_chosen[chosen] += 1
        self._remember(hashes, chosen)
        return Choice(chosen, by_prefix)

    def rename(self, server: str, new_name: str) -> None:
        """Note that a server has lost its cache; ``choose`` knows it by its new name from now on.

        This takes no time, whatever is remembered of the server.
        """
        self._num_chosen[new_name] = self._num_chosen.pop(server, 0)

    def _remembered(self, hashes: Sequence[bytes]) -> list[str]:
        """Return the servers of the remembered pieces, the longest prefix first."""
        return [self._servers[piece] for piece in reversed(hashes) if piece in self._servers]

    def _remember(self, hashes: Sequence[bytes], server: str) -> None:
        # In reverse order, so that the ends of prompts are evicted before their beginnings.
        for piece in reversed(hashes):
            self._servers[piece] = server
            self._servers.move_to_end(piece)
        while len(self._servers) > self._capacity:
            self._servers.popitem(last=False)


def _content(prompt: RoutedPrompt) -> tuple[str | Ids, dict[str, Any]]:
    """Return the content to cut into pieces, and the options whose beginning must be equal, too."""
    if not isinstance(prompt, dict):
        return prompt, {}
    options = {name: value for name, value in prompt.items() if name != "messages"}
    return _beginning(prompt["messages"]), options


def _beginning(values: Iterable[Any]) -> str:
    """Return the beginning of the text of values, up to the length that is hashed.

    Clients choose the size of values, and the event loop waits. The text of a conversation is the
    beginning of its text at the next turn.
    """
    texts: list[str] = []
    length = 0
    for text in islice(chain.from_iterable(map(_texts_of, values)), MAX_VALUES):
        texts.append(text)
        length += len(text)
        if length > MAX_CHARACTERS:
            break
    return "".join(texts)


def _texts_of(value: Any) -> Iterator[str]:
    """Yield texts that stand for a JSON value and show where it ends."""
    if isinstance(value, str):
        yield json.dumps(value[:MAX_CHARACTERS])
    elif isinstance(value, Mapping):
        yield "{"
        for name, item in value.items():
            yield f"{json.dumps(name[:MAX_CHARACTERS])}:"
            yield from _texts_of(item)
        yield "}"
    elif isinstance(value, Sequence):
        yield "["
        for item in value:
            yield from _texts_of(item)
        yield "]"
    else:
        yield f"{json.dumps(value)} "


def _pieces(content: str | Ids) -> Iterator[bytes | memoryview]:
    """Yield the full pieces of the start of a text or of token ids."""
    size = PIECE_CHARACTERS if isinstance(content, str) else PIECE_TOKENS
    starts = range(0, min(len(content) // size, MAX_PIECES) * size, size)
    if isinstance(content, str):
        for start in starts:
            yield content[start : start + size].encode(errors="surrogatepass")
        return
    for start in starts:
        yield content[start : start + size].tobytes()

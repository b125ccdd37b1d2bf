"""Which server a request goes to: the one that has seen its beginning, unless it is much busier.

Servers keep the KV blocks of prompts that they have computed. A gateway has no tokenizer, so it
hashes pieces of the prompt as it came, each together with all before it, and remembers which
server got which piece last.
"""

from __future__ import annotations

import json
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    Ids: TypeAlias = array[int]
else:
    Ids = array  # takes no parameter in Python 3.11

RoutedPrompt: TypeAlias = str | Ids | dict[str, Any]
"""A text, token ids, or chat messages with how to render them."""

PIECE_CHARACTERS = 64  # of text: about a KV block of 16 tokens
PIECE_TOKENS = 16
MAX_PIECES = 256  # what is common after that much matters little
MAX_CHARACTERS = MAX_PIECES * PIECE_CHARACTERS
MAX_REMEMBERED = 2**16
SLACK = 8  # more open requests than half as many again as the idlest server has


class Choice(NamedTuple):
    """A server, and whether it was chosen for what it remembers."""

    server: str
    by_prefix: bool


def prefix_hashes(model: str, cache_salt: str, prompt: RoutedPrompt) -> list[bytes]:
    """A hash for each whole piece of the prompt's beginning and all that comes before it."""
    content, options = _content(prompt)
    running = blake2b(json.dumps([model, cache_salt, options]).encode(), digest_size=16)
    size = PIECE_CHARACTERS if isinstance(content, str) else PIECE_TOKENS
    hashes = []
    for start in range(0, min(len(content) // size, MAX_PIECES) * size, size):
        running.update(_encode(content[start : start + size]))
        hashes.append(running.digest())
    return hashes


class PrefixRouter:
    """Remembers the last ``capacity`` pieces; does no I/O and knows servers by their names."""

    def __init__(self, capacity: int = MAX_REMEMBERED) -> None:
        self._capacity = capacity
        self._servers: OrderedDict[bytes, str] = OrderedDict()
        self._num_chosen: Counter[str] = Counter()

    def choose(self, hashes: Sequence[bytes], loads: Mapping[str, int]) -> Choice:
        """One of the servers in ``loads``, which says how many requests each has open.

        The server of the longest remembered beginning, if it has at most half as many again open
        requests as the idlest, plus ``SLACK``; else the idlest, which from now on is remembered.
        """
        idlest = min(loads, key=lambda name: (loads[name], self._num_chosen[name]))
        known = next((name for name in self._remembered(hashes) if name in loads), None)
        by_prefix = known is not None and loads[known] <= 1.5 * loads[idlest] + SLACK
        chosen = known if known is not None and by_prefix else idlest
        self._num_chosen[chosen] += 1
        self._remember(hashes, chosen)
        return Choice(chosen, by_prefix)

    def _remembered(self, hashes: Sequence[bytes]) -> list[str]:
        """Servers of the remembered pieces, that of the longest beginning first."""
        return [self._servers[piece] for piece in reversed(hashes) if piece in self._servers]

    def _remember(self, hashes: Sequence[bytes], server: str) -> None:
        # Backwards, so that the ends of prompts are forgotten before their beginnings.
        for piece in reversed(hashes):
            self._servers[piece] = server
            self._servers.move_to_end(piece)
        while len(self._servers) > self._capacity:
            self._servers.popitem(last=False)


def _content(prompt: RoutedPrompt) -> tuple[str | Ids, dict[str, Any]]:
    """What a prompt's pieces are cut from, and how else it differs from prompts like it."""
    if not isinstance(prompt, dict):
        return prompt, {}
    options = {name: value for name, value in prompt.items() if name != "messages"}
    return _beginning(prompt["messages"]), options


def _beginning(messages: Sequence[Mapping[str, Any]]) -> str:
    """The JSON text of messages, as far as it is hashed.

    Without the closing bracket the next turn of a conversation begins with this one.
    """
    texts: list[str] = []
    length = 0
    for message in messages:
        content = message["content"]
        if isinstance(content, str):
            message = {**message, "content": content[:MAX_CHARACTERS]}
        texts.append(json.dumps(message))
        length += len(texts[-1])
        if length > MAX_CHARACTERS:
            break
    return "[" + ", ".join(texts)


def _encode(piece: str | Ids) -> bytes:
    if isinstance(piece, str):
        return piece.encode(errors="surrogatepass")
    return array("q", piece).tobytes()

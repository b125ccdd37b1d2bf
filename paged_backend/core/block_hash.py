"""Content hashes of KV blocks: equal hashes mean equal prefixes."""

from __future__ import annotations

import os
from array import array
from hashlib import blake2b

DIGEST_SIZE = 32  # bytes: 128 bits of collision resistance


class BlockHasher:
    """Hashes full blocks with a secret of this engine.

    A block's hash covers its tokens, the hash of the previous block and, through the root of the
    chain, the salt of its request. BLAKE2b is keyed (RFC 7693), so that a client without the
    secret cannot construct a prefix that collides with another tenant's.
    """

    def __init__(self) -> None:
        self._secret = os.urandom(DIGEST_SIZE)

    def root(self, cache_salt: str) -> bytes:
        """The parent of a sequence's first block; requests with different salts share no block."""
        return self._digest(cache_salt.encode(), b"root")

    def block(self, parent: bytes, token_ids: list[int]) -> bytes:
        """The hash of a full block of token ids after the block with the hash ``parent``."""
        return self._digest(parent + array("i", token_ids).tobytes(), b"block")

    def _digest(self, data: bytes, role: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_SIZE, key=self._secret, person=role).digest()

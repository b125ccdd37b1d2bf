"""Content hashes of KV blocks: equal hashes mean equal prefixes."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

DIGEST_SIZE = 32  # bytes: 128 bits of collision resistance


class BlockHasher:
    """Hashes full blocks with a secret key.

    A block's hash covers its tokens, the hash of the previous block and, through the root of the
    chain, everything else that its K and V depend on. BLAKE2b is keyed (RFC 7693), so that a client
    without the key cannot construct a prefix that collides with another tenant's.

    Args:
        key: ``DIGEST_SIZE`` bytes. Processes with the same key compute the same hashes; by default
            each hasher has its own.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(DIGEST_SIZE) if key is None else key

    def root(self, extra_keys: Iterable[str]) -> bytes:
        """The parent of a sequence's first block.

        Requests share no block unless all their extra keys are equal.
        """
        encoded = [key.encode() for key in extra_keys]
        return self._digest(b"".join(len(e).to_bytes(4, "little") + e for e in encoded), b"root")

    def block(self, parent: bytes, token_ids: list[int]) -> bytes:
        """The hash of a full block of token ids after the block with the hash ``parent``."""
        return self._digest(parent + array("i", token_ids).tobytes(), b"block")

    def _digest(self, data: bytes, role: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_SIZE, key=self._key, person=role).digest()


def load_or_create_key(path: Path) -> bytes:
    """Read the key of a hasher from a file; a random key is written if there is no file.

    Raises:
        ValueError: the file has another size, or other users can read it.
    """
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.urandom(DIGEST_SIZE))
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path}: other users can read the key of the prefix cache")
    key = path.read_bytes()
    if len(key) != DIGEST_SIZE:
        raise ValueError(f"{path}: must have {DIGEST_SIZE} bytes, has {len(key)}")
    return key

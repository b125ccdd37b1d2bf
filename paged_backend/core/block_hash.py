"""Content hashes of KV blocks: equal hashes mean equal prefixes."""

from __future__ import annotations

import contextlib
import os
import tempfile
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

DIGEST_SIZE = 32  # bytes: 128 bits of collision resistance


class BlockHasher:
    """Hashes full blocks with a secret key.

    The hashes of a sequence's blocks form a chain. Each hash covers the tokens of its block and the
    hash of the previous block. The chain starts with the root hash, which covers everything else
    that the K and V of the blocks depend on (``cache_salt``). The hash function is keyed BLAKE2b
    (RFC 7693): a client that does not know the key cannot construct a prefix that collides with the
    prefix of another tenant.

    Args:
        key: ``DIGEST_SIZE`` bytes. Processes with the same key compute the same hashes. By default,
            each hasher draws a random key.
    """

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(DIGEST_SIZE) if key is None else key

    def root(self, extra_keys: Iterable[str]) -> bytes:
        """Return the root hash, which is the ``parent`` of a sequence's first block.

        Args:
            extra_keys: what cached blocks depend on besides the tokens, such as ``cache_salt``.
                Only requests with the same extra keys can share blocks.
        """
        encoded = [key.encode() for key in extra_keys]
        return self._digest(b"".join(len(e).to_bytes(4, "little") + e for e in encoded), b"root")

    def block(self, parent: bytes, token_ids: list[int]) -> bytes:
        """Return the hash of a full block.

        Args:
            parent: the hash of the previous block, or the root hash for the first block.
            token_ids: the tokens of the block.
        """
        return self._digest(parent + array("i", token_ids).tobytes(), b"block")

    def _digest(self, data: bytes, role: bytes) -> bytes:
        return blake2b(data, digest_size=DIGEST_SIZE, key=self._key, person=role).digest()


def load_or_create_key(path: Path) -> bytes:
    """Read the key of a hasher from a file; if the file is missing, write a random key to it.

    Raises:
        ValueError: the file does not have ``DIGEST_SIZE`` bytes, or users other than its owner may
            access it.
    """
    if not path.exists():
        # A link to a complete file, so that no other process reads a part of it.
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # a file of mode 0600
            file.write(os.urandom(DIGEST_SIZE))
            file.flush()
            with contextlib.suppress(FileExistsError):
                os.link(file.name, path)
    if path.stat().st_mode & 0o077:
        raise ValueError(f"{path}: other users can read the key of the prefix cache")
    key = path.read_bytes()
    if len(key) != DIGEST_SIZE:
        raise ValueError(f"{path}: must have {DIGEST_SIZE} bytes, has {len(key)}")
    return key

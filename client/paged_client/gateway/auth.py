"""API keys: where they come from, and the door that asks for them."""

from __future__ import annotations

import hmac
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from paged_client.gateway.errors import ApiError

KEYS_VARIABLE = "PAGED_API_KEYS"
MAX_KEY_BYTES = 1024
# What load balancers ask; compared with the path as it came, so that no spelling but this is free.
_OPEN_PATH = b"/health"


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The keys in a file, one on a line, or else in ``PAGED_API_KEYS``, with commas between them.

    None at all leaves the gateway open. Raises ValueError where keys were meant to be but are not.
    """
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"cannot read {file}: {error}") from error
        return _checked(str(file), (line for line in lines if not line.startswith("#")))
    if KEYS_VARIABLE in os.environ:
        return _checked(KEYS_VARIABLE, os.environ[KEYS_VARIABLE].split(","))
    return ()


def _checked(source: str, values: Iterable[str]) -> tuple[str, ...]:
    keys = tuple(stripped for value in values if (stripped := value.strip()))
    if not keys:
        raise ValueError(f"{source} holds no API key")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ValueError(f"{source}: API keys consist of printable ASCII characters without spaces")
    if any(len(key) > MAX_KEY_BYTES for key in keys):
        raise ValueError(f"{source}: an API key has at most {MAX_KEY_BYTES} characters")
    return keys


class RequireApiKey:
    """ASGI middleware; without a key in ``Authorization`` nothing but ``/health`` gets past it."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if scope["type"] == "lifespan" or self._is_allowed(scope):
            return await self._app(scope, receive, send)
        refusal = ApiError(
            401,
            "give one of this server's API keys as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await refusal.response()(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["type"] == "http" and scope["raw_path"] == _OPEN_PATH:
            return True
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and self._is_key(given[0])

    def _is_key(self, header: bytes) -> bool:
        scheme, _, key = header.partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        digest = sha256(key.strip()).digest()
        # Each is compared, in the same time: neither which key nor how much of it was right shows.
        return any([hmac.compare_digest(digest, known) for known in self._digests])

"""API keys: reading them, and the middleware that requires them."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterable, Mapping
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_client.gateway import documentation
from paged_client.gateway.errors import ApiError

KEYS_VARIABLE = "PAGED_API_KEYS"
MAX_KEY_BYTES = 1024
# For load balancers and browsers. Compared with the raw path, so that no other spelling bypasses
# the key.
_HEALTH = ("/health", "/health/live", "/health/ready")
OPEN_PATHS = frozenset(path.encode() for path in (*_HEALTH, *documentation.OPEN_PATHS))
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_STATE = "tenant"  # key in the ``state`` of a request's scope


class ApiKey(NamedTuple):
    """An API key and the tenant of its requests; a tenant may have several keys."""

    key: str
    tenant: str


def read_keys(file: Path | None) -> tuple[ApiKey, ...]:
    """Read the keys in a file, one per line, or else in ``PAGED_API_KEYS``, separated by commas.

    An entry is ``TENANT KEY`` or ``KEY``; a key without a tenant is its own tenant. Without a
    file and without the variable, returns no keys, which leaves the gateway open. Raises ValueError
    if the source cannot be read, has no key or has an invalid one.
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


def tenant_of(request: Request) -> str | None:
    """Return the tenant of a request's API key; None if the gateway requires no keys."""
    return getattr(request.state, _STATE, None)


def _checked(source: str, lines: Iterable[str]) -> tuple[ApiKey, ...]:
    keys = tuple(_api_key(source, line.split()) for line in lines if line.strip())
    if not keys:
        raise ValueError(f"{source} holds no API key")
    if len({key.key for key in keys}) < len(set(keys)):
        raise ValueError(f"{source}: an API key has two tenants")
    return keys


def _api_key(source: str, words: list[str]) -> ApiKey:
    *names, key = words
    if len(names) > 1 or not (key.isascii() and key.isprintable()) or key.startswith("#"):
        raise ValueError(
            f"{source}: an API key consists of printable ASCII characters without spaces, does not "
            "begin with # and may have a tenant's name before it"
        )
    if len(key) > MAX_KEY_BYTES:
        raise ValueError(f"{source}: an API key has at most {MAX_KEY_BYTES} characters")
    if names and not _TENANT.fullmatch(names[0]):
        raise ValueError(f"{source}: the tenant before an API key must match {_TENANT.pattern}")
    return ApiKey(key, names[0] if names else "key-" + sha256(key.encode()).hexdigest()[:12])


class RequireApiKey:
    """ASGI middleware that requires a key for every path except health and documentation.

    The key is in ``Authorization``, or else in ``x-api-key``. Without ``keys``, only the paths with
    other keys require one.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Iterable[ApiKey],
        other_keys: Mapping[str, Iterable[ApiKey]] | None = None,
    ) -> None:
        self._app = app
        self._tenants = _by_digest(keys)
        self._others = {path: _by_digest(other) for path, other in (other_keys or {}).items()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request with its tenant, or refuse it."""
        if scope["type"] == "lifespan" or self._is_open(scope):
            return await self._app(scope, receive, send)
        tenants = self._others.get(scope["path"], self._tenants)
        if not tenants:
            return await self._app(scope, receive, send)
        tenant = _tenant(scope, tenants)
        if tenant is not None:
            scope.setdefault("state", {})[_STATE] = tenant
            return await self._app(scope, receive, send)
        refusal = ApiError(
            401,
            "give one of this server's API keys as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await refusal.response(scope)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return bool(scope["type"] == "http" and scope["raw_path"] in OPEN_PATHS)


def _by_digest(keys: Iterable[ApiKey]) -> dict[bytes, str]:
    return {sha256(key.encode()).digest(): tenant for key, tenant in keys}


def _tenant(scope: Scope, tenants: Mapping[bytes, str]) -> str | None:
    """Return the tenant of a request's key; None if it gives none of the keys."""
    key = _key(scope["headers"])
    if key is None:
        return None
    digest = sha256(key).digest()
    # Constant time over all keys: timing reveals neither which key matched nor how much of it.
    matches = [hmac.compare_digest(digest, known) for known in tenants]
    return next(compress(tenants.values(), matches), None)


def _key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key that a request gives; None if it gives none, or a header twice."""
    bearers = [value for name, value in headers if name == b"authorization"]
    if not bearers:
        keys = [value for name, value in headers if name == b"x-api-key"]
        return keys[0].strip() if len(keys) == 1 else None
    if len(bearers) > 1:
        return None
    scheme, _, key = bearers[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else None

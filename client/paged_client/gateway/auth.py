"""API keys: where they come from, and the door that asks for them."""

from __future__ import annotations

import hmac
import os
import re
from collections.abc import Iterable
from hashlib import sha256
from itertools import compress
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from paged_client.gateway.errors import ApiError

KEYS_VARIABLE = "PAGED_API_KEYS"
MAX_KEY_BYTES = 1024
# What load balancers ask; compared with the path as it came, so that no spelling but this is free.
_OPEN_PATH = b"/health"
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_STATE = "tenant"  # where a request's scope has it


class ApiKey(NamedTuple):
    """A key, and on whose account its requests are; several keys may be of one tenant."""

    key: str
    tenant: str


def read_keys(file: Path | None) -> tuple[ApiKey, ...]:
    """The keys in a file, one on a line, or else in ``PAGED_API_KEYS``, with commas between them.

    ``TENANT KEY`` names whose key it is; one without a name is a tenant of its own. None at all
    leaves the gateway open. Raises ValueError where keys were meant to be but are not.
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
    """On whose account a request is; None where everybody is let in."""
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
    """ASGI middleware; without a key in ``Authorization`` nothing but ``/health`` gets past it."""

    def __init__(self, app: ASGIApp, keys: Iterable[ApiKey]) -> None:
        self._app = app
        self._tenants = {sha256(key.encode()).digest(): tenant for key, tenant in keys}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse."""
        if scope["type"] == "lifespan" or self._is_open(scope):
            return await self._app(scope, receive, send)
        tenant = self._tenant(scope)
        if tenant is not None:
            scope.setdefault("state", {})[_STATE] = tenant
            return await self._app(scope, receive, send)
        refusal = ApiError(
            401,
            "give one of this server's API keys as 'Authorization: Bearer KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
        )
        await refusal.response()(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return bool(scope["type"] == "http" and scope["raw_path"] == _OPEN_PATH)

    def _tenant(self, scope: Scope) -> str | None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:
            return None
        scheme, _, key = given[0].partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        digest = sha256(key.strip()).digest()
        # Each is compared, in the same time: neither which key nor how much of it was right shows.
        matches = [hmac.compare_digest(digest, known) for known in self._tenants]
        return next(compress(self._tenants.values(), matches), None)

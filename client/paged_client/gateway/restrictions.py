"""Groups of routes that require a header of their own."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from paged_client.gateway.errors import ApiError

# The groups of Triton's OpenAI frontend, by the beginnings of their paths.
GROUPS = {
    "inference": (
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/inference/v1", "/tokenize", "/detokenize"),
    ),
    "embedding": (
        *("/v1/embeddings", "/pooling", "/v1/score", "/score"),
        *("/v1/rerank", "/rerank", "/v2/rerank"),
    ),
    "model-repository": ("/v1/models", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    "metrics": ("/metrics",),
    "health": ("/health",),
}
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,64}")
_VALUE = re.compile(r"[\x21-\x7e]{1,1024}")

Restrictions = dict[str, tuple[str, str]]
"""The required header and its value, for each restricted group."""


def read_restrictions(options: Iterable[Sequence[str]]) -> Restrictions:
    """Return the restrictions of options ``GROUP,GROUP HEADER VALUE``.

    Raises:
        ValueError: a group is unknown or given twice, or a header cannot be sent.
    """
    restrictions: Restrictions = {}
    for groups, header, value in options:
        if not (_HEADER.fullmatch(header) and _VALUE.fullmatch(value)):
            raise ValueError("the header and its value must be printable ASCII without spaces")
        for group in groups.split(","):
            if group not in GROUPS:
                raise ValueError(f"the groups are {', '.join(GROUPS)}, got {group[:64]!a}")
            if group in restrictions:
                raise ValueError(f"the group {group} is given twice")
            restrictions[group] = (header.lower(), value)
    return restrictions


class RestrictRoutes:
    """ASGI middleware that requires the header of a restricted group."""

    def __init__(self, app: ASGIApp, restrictions: Restrictions) -> None:
        self._app = app
        self._restrictions = [
            (path, header, value)
            for group, (header, value) in restrictions.items()
            for path in GROUPS[group]
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, or refuse it."""
        if scope["type"] == "http":
            for path, header, value in self._restrictions:
                if scope["path"].startswith(path) and not _has(scope, header, value):
                    refusal = ApiError(
                        401,
                        f"this route needs the header {header} with the right value",
                        code="invalid_auth",
                        headers={"Connection": "close"},
                    )
                    return await refusal.response(scope)(scope, receive, send)
        return await self._app(scope, receive, send)


def _has(scope: Scope, header: str, value: str) -> bool:
    """Return whether a request has the header once, with this value; takes constant time."""
    given = [found for name, found in scope["headers"] if name == header.encode()]
    return len(given) == 1 and hmac.compare_digest(given[0], value.encode())

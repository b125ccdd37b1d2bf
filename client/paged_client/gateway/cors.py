"""Cross-origin requests: which web pages may call the gateway from a browser."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", re.IGNORECASE)
_TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # a method or the name of a header, or "*"
# What browsers let a page read besides the body; the names of requests are useful in reports.
_EXPOSED = ("x-request-id", "request-id", "retry-after", "www-authenticate")


@dataclass(frozen=True, slots=True)
class Cors:
    """The origins, methods and headers that browsers are told to allow; ``*`` stands for all.

    Without origins, which is the default, browsers allow no other site to read an answer.
    """

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    with_credentials: bool = False


def with_cors(app: ASGIApp, cors: Cors) -> ASGIApp:
    """Return an application that answers preflight requests, and marks all other answers.

    A preflight request is answered before the key is checked: browsers send none with it.
    """
    if not cors.origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=cors.origins,
        allow_methods=cors.methods,
        allow_headers=cors.headers,
        allow_credentials=cors.with_credentials,
        expose_headers=_EXPOSED,
    )


def cors_headers(cors: Cors, origin: str) -> dict[str, str]:
    """Return the headers that let a page read a response that the application does not make.

    Args:
        cors: the origins that are allowed.
        origin: the origin of the page; empty if it is not known.
    """
    allows_all = "*" in cors.origins
    if allows_all and not cors.with_credentials:
        origin = "*"
    elif not origin or not (allows_all or origin in cors.origins):
        return {}
    headers = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": ", ".join(_EXPOSED),
    }
    if origin != "*":
        headers["Vary"] = "Origin"
    if cors.with_credentials:
        headers["Access-Control-Allow-Credentials"] = "true"
    return headers


def read_origins(text: str) -> tuple[str, ...]:
    """Return the origins in a JSON list. Raises ValueError."""
    return _strings(text, _ORIGIN, 'origins such as "https://example.org", without a path, or "*"')


def read_tokens(text: str) -> tuple[str, ...]:
    """Return the methods or names of headers in a JSON list. Raises ValueError."""
    return _strings(text, _TOKEN, 'names, or "*"')


def _strings(text: str, form: re.Pattern[str], what: str) -> tuple[str, ...]:
    try:
        values = json.loads(text)
    except ValueError:
        values = None
    if isinstance(values, list) and all(isinstance(v, str) and form.fullmatch(v) for v in values):
        return tuple(values)
    raise ValueError(f"must be a JSON list of {what}, got {text[:64]!a}")

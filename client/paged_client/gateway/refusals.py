"""Responses to requests that no application sees, because they are refused on their connection."""

from __future__ import annotations

import re
from http import HTTPStatus

import h11

from paged_client.gateway.cors import Cors, cors_headers
from paged_client.gateway.errors import ApiError
from paged_client.gateway.events import to_json

_PATH = re.compile(rb"[A-Z]+ ([^ ?\r\n]*)")
_ORIGIN = re.compile(rb"\norigin:[ \t]*([!-~]*)", re.IGNORECASE)
Refusal = tuple[h11.Response, h11.Data, h11.EndOfMessage]


def refusal(error: ApiError, head: bytes, cors: Cors) -> Refusal:
    """Return an error as a response that ends its connection.

    Its format follows the API of the path, and the page of an allowed origin can read it.

    Args:
        error: what was refused.
        head: the request's line and headers as received, which may be cut or invalid.
        cors: the origins that are allowed.
    """
    path, origin = _PATH.match(head), _ORIGIN.search(head)
    body = error.body_for("" if path is None else path[1].decode("latin-1"))
    content = to_json(body).encode()
    headers = {
        **error.headers,
        **cors_headers(cors, "" if origin is None else origin[1].decode()),
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
    }
    start = h11.Response(
        status_code=error.status,
        headers=list(headers.items()),
        reason=HTTPStatus(error.status).phrase,
    )
    return start, h11.Data(data=content), h11.EndOfMessage()

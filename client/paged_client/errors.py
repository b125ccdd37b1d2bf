"""What can go wrong with a request, as exceptions.

ClientError
├── InvalidRequest      the server, or this library, refuses the request as it is
│   └── UnknownModel    the server has no model of that name, or none that is loaded
├── Unavailable         nobody answers at that address, or the server takes no request now
├── RequestCancelled    the request was cancelled, by this side or by the server
├── RequestTimeout      the caller's time was over; the request was cancelled on the server
└── ServerError         anything else: a fault of the server
"""

from __future__ import annotations

import re

import grpc


class ClientError(Exception):
    """Base of every error of this library."""

    @property
    def reason(self) -> str | None:
        """The word that a server puts before such an error, for programs: ``queue_full``..."""
        found = _REASON.match(str(self))
        return found[1] if found else None


class InvalidRequest(ClientError):
    """The request can never succeed as it is; the message names the field."""


class UnknownModel(InvalidRequest):
    """The server has no such model, or has not loaded it."""


class Unavailable(ClientError):
    """No server there, or one that takes no request now; the message says which."""

    @property
    def retry_after_s(self) -> float | None:
        """How long the server wants to be left alone, if it says."""
        found = _RETRY_AFTER.search(str(self))
        return float(found[1]) if found else None


class RequestCancelled(ClientError):
    """The request was cancelled before its end."""


class RequestTimeout(ClientError):
    """The request took longer than its ``timeout``; it was cancelled on the server."""


class ServerError(ClientError):
    """The server failed, or broke the protocol."""


_BY_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: UnknownModel,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: RequestTimeout,
}

# Words before the texts that are not about a request's content.
_BY_REASON: dict[str, type[ClientError]] = {
    "queue_full": Unavailable,
    "rate_limited": Unavailable,
    "draining": Unavailable,
    "engine_dead": Unavailable,
    "deadline": RequestTimeout,
    "crash_limit": ServerError,
}
# How others begin; all but "internal error" are Triton's own.
_BY_BEGINNING: dict[str, type[ClientError]] = {
    "internal error": ServerError,
    "Request was cancelled": RequestCancelled,
    "Request for unknown model": UnknownModel,
    "Stub process": Unavailable,
    "Failed to process the request": ServerError,
}
_REASON = re.compile(rf"({'|'.join(_BY_REASON)}): ")
_RETRY_AFTER = re.compile(r"retry after (\d{1,9}(?:\.\d{1,9})?) s$")
_STEP = re.compile(r"in ensemble '[^']*', ")  # what the server puts before an error of a step


def from_status(status: grpc.RpcError) -> ClientError:
    """The exception for a gRPC status that is not OK."""
    code = status.code()
    message = _STEP.sub("", status.details() or code.name.lower(), count=1)
    # A reason says more than the code: a deadline of the server's has the code CANCELLED.
    kind = _kind_by_reason(message) or _BY_STATUS.get(code, ServerError)
    return kind(message)


def from_text(message: str) -> ClientError:
    """The exception for an error inside a stream, which carries a text and no status.

    The header ``triton_grpc_error`` would add the status, but makes tritonserver 24.10 crash when
    several streams end with an error at once.
    """
    message = _STEP.sub("", message, count=1)
    by_beginning = (kind for start, kind in _BY_BEGINNING.items() if message.startswith(start))
    kind = _kind_by_reason(message) or next(by_beginning, InvalidRequest)
    return kind(message)


def _kind_by_reason(message: str) -> type[ClientError] | None:
    found = _REASON.match(message)
    return _BY_REASON[found[1]] if found else None

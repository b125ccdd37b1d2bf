"""The exceptions of this library.

ClientError
├── InvalidRequest      the server, or this library, refuses the request as it is
│   └── UnknownModel    the server has no model of that name, or none that is loaded
├── Unavailable         no server answers at that address, or it accepts no requests now
├── RequestCancelled    the request was cancelled, by this client or by the server
├── RequestTimeout      the timeout passed; the request was cancelled on the server
└── ServerError         any other error: the server failed
"""

from __future__ import annotations

import re

import grpc


class ClientError(Exception):
    """Base class of this library's errors."""

    @property
    def reason(self) -> str | None:
        """Machine-readable code at the start of the message, such as ``queue_full``, if any."""
        found = _REASON.match(str(self))
        return found[1] if found else None


class InvalidRequest(ClientError):
    """The request can never succeed as it is; the message names the field."""


class UnknownModel(InvalidRequest):
    """The server has no such model, or has not loaded it."""


class Unavailable(ClientError):
    """No server answers, or it accepts no requests now; the message says which."""

    @property
    def retry_after_s(self) -> float | None:
        """Seconds to wait before a retry, if the server's message gives them."""
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

# Codes at the start of messages about anything but the request's content.
_BY_REASON: dict[str, type[ClientError]] = {
    "queue_full": Unavailable,
    "rate_limited": Unavailable,
    "process_lost": Unavailable,
    "draining": Unavailable,
    "engine_dead": Unavailable,
    "deadline": RequestTimeout,
    "crash_limit": ServerError,
}
# Prefixes of messages without a code; all but "internal error" are Triton's own.
_BY_BEGINNING: dict[str, type[ClientError]] = {
    "internal error": ServerError,
    "Request was cancelled": RequestCancelled,
    "Request for unknown model": UnknownModel,
    "Stub process": Unavailable,
    "Failed to process the request": ServerError,
}
_REASON = re.compile(rf"({'|'.join(_BY_REASON)}): ")
_RETRY_AFTER = re.compile(r"retry after (\d{1,9}(?:\.\d{1,9})?) s$")
_STEP = re.compile(r"in ensemble '[^']*', ")  # Triton's prefix for an error of an ensemble's step


def from_status(status: grpc.RpcError) -> ClientError:
    """Return the exception for a gRPC status that is not OK."""
    code = status.code()
    message = _STEP.sub("", status.details() or code.name.lower(), count=1)
    # The reason is more precise than the status: the server's own deadline has status CANCELLED.
    kind = _kind_by_reason(message) or _BY_STATUS.get(code, ServerError)
    return kind(message)


def from_text(message: str) -> ClientError:
    """Return the exception for an error inside a stream, which has a text and no status.

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

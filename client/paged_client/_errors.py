"""What can go wrong with a request, as exceptions.

ClientError
├── InvalidRequest      the server, or this library, refuses the request as it is
├── Unavailable         nobody answers at that address, or the server takes no request now
├── RequestCancelled    the request was cancelled, by this side or by the server
├── RequestTimeout      the caller's time was over; the request was cancelled on the server
└── ServerError         anything else: a fault of the server
"""

from __future__ import annotations

import grpc


class ClientError(Exception):
    """Base of every error of this library."""


class InvalidRequest(ClientError):
    """The request can never succeed as it is; the message names the field."""


class Unavailable(ClientError):
    """No server there, or one that takes no request now; the message says which."""


class RequestCancelled(ClientError):
    """The request was cancelled before its end."""


class RequestTimeout(ClientError):
    """The request took longer than its ``timeout``; it was cancelled on the server."""


class ServerError(ClientError):
    """The server failed, or broke the protocol."""


_BY_STATUS: dict[grpc.StatusCode, type[ClientError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.CANCELLED: RequestCancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: RequestTimeout,
}

# How the texts begin that are not about the request itself; the last two are Triton's own.
_BY_BEGINNING: dict[str, type[ClientError]] = {
    "queue_full:": Unavailable,
    "draining:": Unavailable,
    "engine_dead:": Unavailable,
    "Request was cancelled": RequestCancelled,
    "internal error": ServerError,
    "Stub process": Unavailable,
    "Failed to process the request": ServerError,
}


def from_status(status: grpc.RpcError) -> ClientError:
    """The exception for a gRPC status that is not OK."""
    code = status.code()
    return _BY_STATUS.get(code, ServerError)(status.details() or code.name.lower())


def from_text(message: str) -> ClientError:
    """The exception for an error inside a stream, which carries a text and no status.

    The header ``triton_grpc_error`` would add the status, but makes tritonserver 24.10 crash when
    several streams end with an error at once.
    """
    for beginning, kind in _BY_BEGINNING.items():
        if message.startswith(beginning):
            return kind(message)
    return InvalidRequest(message)

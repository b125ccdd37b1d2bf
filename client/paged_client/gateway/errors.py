"""Errors in OpenAI's format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from paged_client import ClientError, InvalidRequest, RequestTimeout, Unavailable, UnknownModel

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error"}
_FIELD = re.compile(r"([a-z_]+)((?:\[\d+\]|\.[a-z_]+)*): ")
# The engine's field names that differ from the gateway's, with the gateway's names.
_NAMES = {"text_input": "prompt", "input_ids": "prompt"}


class ApiError(Exception):
    """An error response; ``param`` is the invalid field, ``code`` is machine-readable."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})
        self.body: dict[str, Any] = {
            "error": {
                "message": message,
                "type": _TYPES.get(status, "invalid_request_error"),
                "param": param,
                "code": code,
            }
        }

    @classmethod
    def field(cls, name: str, problem: str) -> ApiError:
        """Return the error for an invalid field."""
        return cls(400, f"{name}: {problem}", param=name)

    @classmethod
    def from_client(cls, error: ClientError, names: Mapping[str, str] = _NAMES) -> ApiError:
        """Convert a server's error; ``names`` maps the engine's field names to the gateway's."""
        message = str(error)
        match error:
            case UnknownModel():
                return cls(404, message, param="model", code="model_not_found")
            case InvalidRequest():
                return cls._from_refusal(message, names)
            case RequestTimeout():
                if error.reason is None:
                    message = "deadline: the answer took longer than is allowed"
                return cls(504, message, code="deadline", headers={"Retry-After": "1"})
            case Unavailable():
                return cls._later(error)
            case _:
                return cls(500, message, code=error.reason)

    @classmethod
    def _from_refusal(cls, message: str, names: Mapping[str, str]) -> ApiError:
        found = _FIELD.match(message)
        if found is None:
            return cls(400, message)
        param = names.get(found[1], found[1]) + found[2]
        return cls.field(param, message[found.end() :])

    @classmethod
    def _later(cls, error: Unavailable) -> ApiError:
        wait_s = max(1, math.ceil(error.retry_after_s or 0))
        return cls(
            429 if error.reason == "rate_limited" else 503,
            # Not gRPC's message, which contains addresses behind the gateway.
            str(error) if error.reason else "no server is there for the model now",
            code=error.reason or "unavailable",
            headers={"Retry-After": str(wait_s)},
        )

    def response(self) -> JSONResponse:
        """Return the HTTP response."""
        return JSONResponse(self.body, self.status, self.headers)

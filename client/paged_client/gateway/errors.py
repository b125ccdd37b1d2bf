"""Errors in the formats of OpenAI and Anthropic."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from paged_client import ClientError, InvalidRequest, RequestTimeout, Unavailable, UnknownModel

_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error", 504: "timeout_error"}
_FIELD = re.compile(r"([a-z_]+)((?:\[\d+\]|\.[a-z_]+)*): ")
_UNKNOWN_ADAPTER = re.compile(r"LoRA .* is not supported[,:] ")
_HEAD = re.compile(r"[a-z_]*")
_TOO_LONG = re.compile(r"has \d+ (tokens; at most|characters, more than can become) (\d+) tokens")
_MAX_MODEL_LEN = re.compile(r"max_model_len \((\d+)\)")
# The engine's field names that differ from OpenAI's, with OpenAI's names.
_NAMES = {"text_input": "prompt", "input_ids": "prompt", "task": "model"}
_MESSAGES_PATH = "/v1/messages"  # below it errors have Anthropic's format
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def openai_field(name: str) -> str:
    """Return the name in chats and completions for one of the engine's fields."""
    head = _HEAD.match(name)
    assert head is not None
    return _NAMES.get(head[0], head[0]) + name[head.end() :]


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
    def from_client(
        cls, error: ClientError, field_name: Callable[[str], str] = openai_field
    ) -> ApiError:
        """Convert a server's error; ``field_name`` maps the engine's field names to the API's."""
        message = str(error)
        match error:
            case UnknownModel():
                return cls(404, message, param="model", code="model_not_found")
            case InvalidRequest():
                return cls._from_refusal(message, field_name)
            case RequestTimeout():
                if error.reason is None:
                    message = "deadline: the answer took longer than is allowed"
                return cls(504, message, code="deadline", headers={"Retry-After": "1"})
            case Unavailable():
                return cls._later(error)
            case _:
                return cls(500, message, code=error.reason)

    @classmethod
    def _from_refusal(cls, message: str, field_name: Callable[[str], str]) -> ApiError:
        if _UNKNOWN_ADAPTER.match(message):
            return cls(404, message, param="model", code="model_not_found")
        found = _FIELD.match(message)
        if found is None:
            return cls(400, message)
        name, problem = field_name(found[1] + found[2]), message[found.end() :]
        too_long = _TOO_LONG.match(problem)
        if too_long is None:
            return cls.field(name, problem)
        # Client libraries look for OpenAI's code, and some for its words.
        length = _MAX_MODEL_LEN.search(problem)
        most = too_long[2] if length is None else length[1]
        text = f"{name}: {problem}. This model's maximum context length is {most} tokens."
        return cls(400, text, param=name, code="context_length_exceeded")

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

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The body in Anthropic's format."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(self)}}

    def response(self, scope: Scope) -> JSONResponse:
        """Return the HTTP response to a request, in the format of the API of its path."""
        return JSONResponse(self.body_for(scope["path"]), self.status, self.headers)

    def body_for(self, path: str) -> dict[str, Any]:
        """Return the body in the format of the API of a path."""
        is_messages = path == _MESSAGES_PATH or path.startswith(f"{_MESSAGES_PATH}/")
        return self.anthropic_body if is_messages else self.body

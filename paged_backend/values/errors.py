"""Errors, by who must act, so that each protocol can map them without reading their text.

PagedError
├── InvalidRequest      the caller's mistake in one request; nobody else is affected
├── ConfigError         the operator's mistake in an option or a checkpoint; nothing starts
├── RequestRefused      a valid request that is not accepted now (``reason`` says why)
├── DeadlineExceeded    a sound request whose time was over before its answer
├── CrashLimit          a request that may be what the engine dies of
└── EngineDead          there is no engine and none comes back in time
"""

from __future__ import annotations

import traceback
from pathlib import Path


class PagedError(Exception):
    """Base of all errors that a user of this package is meant to see."""


class InvalidRequest(PagedError, ValueError):
    """A request that can never succeed as it is; the message names the field."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field

    def renamed(self, field: str) -> InvalidRequest:
        """The same for a caller who knows the field by another name."""
        return InvalidRequest(field, str(self).removeprefix(f"{self.field}: "))

    @classmethod
    def verbatim(cls, field: str, message: str) -> InvalidRequest:
        """An error with a text that must not change, because clients of other servers match it."""
        error = cls(field, message)
        error.args = (message,)
        return error


class ConfigError(PagedError, ValueError):
    """An option or a checkpoint that cannot be used; the message says what to do."""


class RequestRefused(PagedError, RuntimeError):
    """A valid request that is not accepted now; ``reason`` is machine-readable."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(f"{reason}: {problem}")
        self.reason = reason
        self.problem = problem


class DeadlineExceeded(PagedError, TimeoutError):
    """A request was not finished before its deadline."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"deadline: timeout_s ({timeout_s:g}) is over")


class CrashLimit(PagedError, RuntimeError):
    """A request was in flight at several engine crashes, so it is not retried."""

    def __init__(self, num_crashes: int) -> None:
        super().__init__(
            f"crash_limit: the request was in flight at {num_crashes} ends of the engine and may "
            "be their cause"
        )


class EngineDead(PagedError, RuntimeError):
    """The engine has ended, and no other was started in time."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"engine_dead: {problem}")
        self.problem = problem


def as_exception(error: BaseException) -> Exception:
    """Return an Exception for any error; a panic in a Rust library is a BaseException only."""
    return error if isinstance(error, Exception) else RuntimeError(type(error).__name__)


def place_of(error: BaseException) -> str:
    """Describe an error by its type and place, but not its text, which may quote a prompt."""
    frames = traceback.extract_tb(error.__traceback__)[-3:]
    places = (f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
    return f"{type(error).__name__} at {', '.join(places)}"


def option_error(name: str, problem: str) -> ConfigError:
    """Return the error for an option that cannot be used."""
    return ConfigError(f"option {name} {problem}")

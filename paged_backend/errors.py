"""Errors by blame, so that each door can map them without reading their text.

PagedError
├── InvalidRequest      the caller's mistake in one request; nobody else is affected
├── ConfigError         the operator's mistake in an option or a checkpoint; nothing starts
├── RequestRefused      a sound request that cannot be taken now (``reason`` says why)
└── EngineDead          the engine process is gone; open requests cannot continue
"""

from __future__ import annotations


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
        """An error whose exact text is part of a contract."""
        error = cls(field, message)
        error.args = (message,)
        return error


class ConfigError(PagedError, ValueError):
    """An option or a checkpoint that cannot be used; the message says what to do."""


class RequestRefused(PagedError, RuntimeError):
    """A sound request that is not accepted now; ``reason`` is machine-readable."""

    def __init__(self, reason: str, problem: str) -> None:
        super().__init__(f"{reason}: {problem}")
        self.reason = reason


class EngineDead(PagedError, RuntimeError):
    """The engine process has ended while requests depended on it."""

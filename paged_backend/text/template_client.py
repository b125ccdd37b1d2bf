"""Renders chat templates in a process with limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_backend.sandbox.client import NoAnswer, Sandbox
from paged_backend.text.template_process import TIME_LIMIT_S
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.validation import shorten

MAX_PROBLEM_LENGTH = 240  # characters
# A client can use two at once, with a chat and with one that has a constraint on its answer.
MAX_PROCESSES = 3


class TemplateClient:
    """Renders templates, each in a process that renders no other; any thread may use it."""

    def __init__(self) -> None:
        self._sandbox = Sandbox(
            "paged_backend.text.template_process",
            subject="chat template",
            time_limit_s=TIME_LIMIT_S,
            max_processes=MAX_PROCESSES,
        )

    def start(self) -> None:
        """Start the process, so that the first request need not wait a second for it."""
        self._sandbox.start()

    def close(self) -> None:
        """End the processes that no request uses; another request starts new ones."""
        self._sandbox.close()

    def syntax_problem(self, source: str) -> str:
        """Return what is wrong with the syntax of a template; empty if nothing is.

        Raises:
            RequestRefused: see `render`.
        """
        try:
            answer = self._sandbox.ask({"check": source})
        except NoAnswer as error:
            answer = {"text": str(error)}
        return shorten(answer.get("problem") or answer["text"], MAX_PROBLEM_LENGTH, quote=False)

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Render a template with `transformers`.

        Raises:
            InvalidRequest: the template refuses these messages, or takes too long or too much.
            RequestRefused: the requests of other clients took all of the time, or the process was
                ended from outside.
        """
        try:
            answer = self._sandbox.ask(dict(arguments))
        except NoAnswer as error:
            raise _error(str(error)) from None
        if "problem" in answer:
            raise _error(answer["problem"])
        return str(answer["text"])


def _error(problem: str) -> InvalidRequest:
    return InvalidRequest("messages", shorten(problem, MAX_PROBLEM_LENGTH, quote=False))

"""Renders chat templates in a process with limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paged_backend.errors import InvalidRequest
from paged_backend.sandbox.client import NoAnswer, Sandbox
from paged_backend.text.template_process import TIME_LIMIT_S
from paged_backend.validation import shorten

MAX_PROBLEM_LENGTH = 240  # characters


class TemplateClient:
    """Renders one template at a time; any thread may use it."""

    def __init__(self) -> None:
        self._sandbox = Sandbox(
            "paged_backend.text.template_process",
            subject="chat template",
            time_limit_s=TIME_LIMIT_S,
        )

    def start(self) -> None:
        """Start the process, so that the first request need not wait a second for it."""
        self._sandbox.start()

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Render a template with `transformers`.

        Raises:
            InvalidRequest: the template refuses these messages, or takes too long or too much; or
                the process does not answer in time.
            RequestRefused: the requests of other clients took all of the time.
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

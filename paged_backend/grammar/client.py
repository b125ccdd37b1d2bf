"""Checks the constraints of requests in a process with limits, and makes grammars of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from paged_backend.grammar.compile_process import TIME_LIMIT_S
from paged_backend.output_constraint import OutputConstraint
from paged_backend.sandbox.client import NoAnswer, Sandbox
from paged_backend.validation import shorten

MAX_CACHED = 256  # constraints whose grammar is remembered
MAX_CACHED_LENGTH = 2**24  # characters of these grammars
MAX_PROBLEM_LENGTH = 300  # characters


class GrammarChecker:
    """Translates constraints for one model; any thread may use it.

    The process is started when the first constraint arrives, as most deployments see none.

    Args:
        tokenizer: folder or Hugging Face id.
        vocab_size: of the model.
    """

    def __init__(self, tokenizer: str | Path, vocab_size: int) -> None:
        self._sandbox = Sandbox(
            "paged_backend.grammar.compile_process",
            subject="structured output",
            time_limit_s=TIME_LIMIT_S,
            arguments=[str(tokenizer), str(vocab_size)],
        )
        self._lock = threading.Lock()
        self._cache: OrderedDict[OutputConstraint, str] = OrderedDict()
        self._cached_length = 0

    def grammar(self, constraint: OutputConstraint) -> str:
        """Return the grammar of a constraint, which an engine can compile.

        Raises:
            InvalidRequest: the constraint cannot be enforced, or takes too much time or memory.
            RequestRefused: the constraints of other requests took all of the time.
        """
        with self._lock:
            if constraint in self._cache:
                self._cache.move_to_end(constraint)
                return self._cache[constraint]
        grammar = self._ask(constraint)
        with self._lock:
            self._remember(constraint, grammar)
        return grammar

    def _ask(self, constraint: OutputConstraint) -> str:
        try:
            answer = self._sandbox.ask(constraint.as_json())
        except NoAnswer as error:
            reason = "schema_timeout: " if error.timed_out else ""
            raise constraint.error(None, f"{reason}{error}") from None
        if "problem" in answer:
            problem = shorten(answer["problem"], MAX_PROBLEM_LENGTH, quote=False)
            raise constraint.error(answer.get("field"), problem)
        return str(answer["grammar"])

    def _remember(self, constraint: OutputConstraint, grammar: str) -> None:
        if constraint not in self._cache:
            self._cache[constraint] = grammar
            self._cached_length += len(grammar)
        while len(self._cache) > MAX_CACHED or self._cached_length > MAX_CACHED_LENGTH:
            _, oldest = self._cache.popitem(last=False)
            self._cached_length -= len(oldest)

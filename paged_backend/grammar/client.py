"""Checks the constraints of requests in a process with limits, and makes grammars of them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import asdict, replace
from pathlib import Path

from paged_backend.grammar.compile_process import TIME_LIMIT_S
from paged_backend.sampling_params import SamplingParams
from paged_backend.sandbox.client import NoAnswer, Sandbox
from paged_backend.structured_outputs import StructuredOutputsParams
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
        self._cache: OrderedDict[StructuredOutputsParams, str] = OrderedDict()
        self._cached_length = 0

    def resolve(self, params: SamplingParams) -> tuple[SamplingParams, str]:
        """Translate the constraint of a request.

        Returns:
            The parameters without the constraint, and its grammar; empty without one.

        Raises:
            InvalidRequest: the constraint cannot be enforced, or takes too much time or memory.
            RequestRefused: the constraints of other requests took all of the time.
        """
        if params.structured_outputs is None:
            return params, ""
        grammar = self.grammar(params.structured_outputs)
        return replace(params, structured_outputs=None), grammar

    def grammar(self, params: StructuredOutputsParams) -> str:
        """Return the grammar of a constraint, which an engine can compile.

        Raises:
            InvalidRequest: the constraint cannot be enforced, or takes too much time or memory.
            RequestRefused: the constraints of other requests took all of the time.
        """
        with self._lock:
            if params in self._cache:
                self._cache.move_to_end(params)
                return self._cache[params]
        grammar = self._ask(params)
        with self._lock:
            self._remember(params, grammar)
        return grammar

    def _ask(self, params: StructuredOutputsParams) -> str:
        given = {name: value for name, value in asdict(params).items() if value}
        given.pop("origin")
        try:
            answer = self._sandbox.ask(given)
        except NoAnswer as error:
            reason = "schema_timeout: " if error.timed_out else ""
            raise params.error(f"{reason}{error}") from None
        if "problem" in answer:
            raise params.error(shorten(answer["problem"], MAX_PROBLEM_LENGTH, quote=False))
        return str(answer["grammar"])

    def _remember(self, params: StructuredOutputsParams, grammar: str) -> None:
        if params not in self._cache:
            self._cache[params] = grammar
            self._cached_length += len(grammar)
        while len(self._cache) > MAX_CACHED or self._cached_length > MAX_CACHED_LENGTH:
            _, oldest = self._cache.popitem(last=False)
            self._cached_length -= len(oldest)

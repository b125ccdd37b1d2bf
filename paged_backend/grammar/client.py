"""Checks the constraints of requests in a process with limits, and makes grammars of them."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from pathlib import Path

from paged_backend.grammar.compile_process import TIME_LIMIT_S
from paged_backend.grammar.offenses import WINDOW_S, Offenses
from paged_backend.sandbox.client import NoAnswer, Sandbox
from paged_backend.values.errors import InvalidRequest, RequestRefused
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.validation import shorten

MAX_CACHED = 256  # constraints with a remembered grammar
MAX_CACHED_LENGTH = 2**24  # characters of these grammars
MAX_FAILED = 256  # constraints that took too much time and are not tried again for WINDOW_S
MAX_PROBLEM_LENGTH = 300  # characters

Key = tuple[str, OutputConstraint]
"""The salt of a request, which keeps tenants apart, and its constraint."""


class GrammarChecker:
    """Translates constraints for one model; any thread may use it.

    The process is started when the first constraint arrives, as most deployments see none.

    Args:
        tokenizer: folder or Hugging Face id.
        vocab_size: size of the model's vocabulary.
    """

    def __init__(self, tokenizer: str | Path, vocab_size: int) -> None:
        self._sandbox = Sandbox(
            "paged_backend.grammar.compile_process",
            subject="structured output",
            time_limit_s=TIME_LIMIT_S,
            arguments=[str(tokenizer), str(vocab_size)],
        )
        self._lock = threading.Lock()
        self._cache: OrderedDict[Key, str] = OrderedDict()
        self._cached_length = 0
        self._failed: OrderedDict[Key, tuple[float, InvalidRequest]] = OrderedDict()
        self._offenses = Offenses()

    def grammar(
        self, constraint: OutputConstraint, *, tenant: str | None = None, salt: str = ""
    ) -> str:
        """Return the grammar of a constraint, which an engine can compile.

        Args:
            constraint: constraint of a request.
            tenant: the account of a request's client; empty for all clients without one, None for
                the only user of this process, who has the usual limit always.
            salt: results are remembered for requests with the same salt only. Otherwise the time
                of an answer would tell one tenant what another one asks for.

        Raises:
            InvalidRequest: the constraint cannot be enforced, or takes too much time or memory.
            RequestRefused: the constraints of other requests took all of the time, the tenant's
                earlier ones took too much, or the process was ended from outside.
        """
        key = (salt, constraint)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
            self._check_not_failed(key)
        grammar = self._ask(key, tenant)
        with self._lock:
            self._remember(key, grammar)
        return grammar

    def _ask(self, key: Key, tenant: str | None) -> str:
        _, constraint = key
        limit_s, is_suspect = None, False
        if tenant is not None:
            with self._lock:
                limit_s = self._offenses.time_limit_s(tenant)
                is_suspect = self._offenses.has_any(tenant)
        try:
            answer = self._sandbox.ask(
                constraint.as_json(), time_limit_s=limit_s, leaves_ready=is_suspect
            )
        except (NoAnswer, RequestRefused) as error:
            raise self._offense(key, tenant, error, is_short=limit_s is not None) from None
        if "problem" in answer:
            problem = shorten(answer["problem"], MAX_PROBLEM_LENGTH, quote=False)
            raise constraint.error(answer.get("field"), problem)
        return str(answer["grammar"])

    def _offense(
        self, key: Key, tenant: str | None, error: NoAnswer | RequestRefused, *, is_short: bool
    ) -> InvalidRequest | RequestRefused:
        """Count what went wrong with a constraint; returns the error for its client.

        A process that was ended from outside twice may have been ended by the kernel because of
        what this constraint needs, so that counts, too.
        """
        if isinstance(error, RequestRefused) and error.reason != "process_lost":
            return error
        with self._lock:
            if tenant is not None:
                self._offenses.add(tenant)
            if isinstance(error, RequestRefused):
                return error
            if is_short and error.timed_out:
                return self._offenses.refusal(tenant or "")
            reason = "schema_timeout: " if error.timed_out else ""
            problem = key[1].error(None, f"{reason}{error}")
            self._failed[key] = (time.monotonic() + WINDOW_S, problem)
            if len(self._failed) > MAX_FAILED:
                self._failed.popitem(last=False)
            return problem

    def _check_not_failed(self, key: Key) -> None:
        until_s, problem = self._failed.get(key, (0.0, None))
        if problem is None:
            return
        if time.monotonic() < until_s:
            raise problem.renamed(problem.field)
        del self._failed[key]

    def _remember(self, key: Key, grammar: str) -> None:
        if key not in self._cache:
            self._cache[key] = grammar
            self._cached_length += len(grammar)
        while len(self._cache) > MAX_CACHED or self._cached_length > MAX_CACHED_LENGTH:
            _, oldest = self._cache.popitem(last=False)
            self._cached_length -= len(oldest)

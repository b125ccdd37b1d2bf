"""Regular expressions of a checkpoint, matched within a limit of time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.quantization.pattern_process import TIME_LIMIT_S
from paged_backend.sandbox.client import NoAnswer, Sandbox
from paged_backend.values.errors import RequestRefused
from paged_backend.values.validation import shorten

MAX_LENGTH = 2**10  # characters of an expression: each is compiled in this process, too
_SEARCH_S = 0.5  # for each half of a list, when the expression is looked for that takes too long


class PatternMatcher:
    """Matches the expressions of one checkpoint in a process, which ends with this object."""

    def __init__(self) -> None:
        self._left_s = TIME_LIMIT_S
        self._sandbox = Sandbox(
            "paged_backend.quantization.pattern_process",
            subject="expression",
            time_limit_s=TIME_LIMIT_S,
            max_processes=1,
        )

    def first(self, expressions: Sequence[str], name: str) -> int | None:
        """Return the index of the first expression that the beginning of a name matches.

        Raises:
            NoAnswer: all calls together have taken over `TIME_LIMIT_S`.
        """
        answer = self._ask(expressions, name, self._left_s)
        self._left_s -= answer["seconds"]
        if self._left_s <= 0:
            raise NoAnswer("the expressions took too long")
        first: int | None = answer["first"]
        return first

    def slowest(self, expressions: Sequence[str], name: str) -> str:
        """Return the expression that takes longest, found by halves of the list."""
        while len(expressions) > 1:
            middle = len(expressions) // 2
            halves = expressions[:middle], expressions[middle:]
            expressions = max(halves, key=lambda half: self._seconds(half, name))
        return expressions[0]

    def _seconds(self, expressions: Sequence[str], name: str) -> float:
        try:
            return float(self._ask(expressions, name, _SEARCH_S)["seconds"])
        except NoAnswer:
            return _SEARCH_S

    def _ask(self, expressions: Sequence[str], name: str, limit_s: float) -> dict[str, Any]:
        return self._sandbox.ask(
            {"patterns": list(expressions), "name": name}, time_limit_s=limit_s
        )


class Patterns:
    """Regular expressions under a key of a config.

    Args:
        config: the object that has the key.
        key: what messages name.
        expressions: the expressions.
        matcher: matches those of the whole checkpoint.

    Raises:
        ConfigError: one is too long, or none.
    """

    def __init__(
        self, config: ConfigFile, key: str, expressions: Sequence[str], matcher: PatternMatcher
    ) -> None:
        self._config = config
        self._key = key
        self._expressions = list(expressions)
        self._matcher = matcher
        self._firsts: dict[str, int | None] = {}  # results for the names so far
        for expression in self._expressions:
            self._check(expression)

    def first(self, name: str) -> int | None:
        """Return the index of the first expression that the beginning of a name matches.

        Raises:
            ConfigError: the names so far have taken too long.
        """
        if self._expressions and name not in self._firsts:
            self._firsts[name] = self._match(name)
        return self._firsts.get(name)

    def _match(self, name: str) -> int | None:
        try:
            return self._matcher.first(self._expressions, name)
        except NoAnswer:
            slow = self._matcher.slowest(self._expressions, name)
            problem = f"holds an expression that takes too long to match, {shorten(slow, 200)}: "
            problem += f"the names of all layers may take {TIME_LIMIT_S:g} s"
        except RequestRefused as error:
            problem = f"holds expressions that could not be matched: {error}"
        raise self._config.error(self._key, problem)

    def _check(self, expression: str) -> None:
        if len(expression) > MAX_LENGTH:
            problem = f"holds an expression of {len(expression)} characters; at most {MAX_LENGTH} "
            raise self._config.error(self._key, problem + "are supported")
        try:
            re.compile(expression)
        except (re.error, RecursionError, OverflowError) as error:
            problem = f"holds a wrong expression, {shorten(expression)}: {error}"
            raise self._config.error(self._key, problem) from error

"""Regular expressions of a checkpoint, matched within a limit of time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from paged_backend.checkpoint.config_file import ConfigFile
from paged_backend.quantization.pattern_process import TIME_LIMIT_S
from paged_backend.sandbox.client import NoAnswer, Sandbox
from paged_backend.values.errors import RequestRefused
from paged_backend.values.validation import shorten

MAX_LENGTH = 2**10  # characters of an expression
# Wall-clock time of all calls. Each takes 0.25 ms, and a large model has 70,000 names.
WALL_LIMIT_S = 120.0
_SEARCH_S = 0.5  # processor time for half of a list in the search for the slow expression
_HALF = -1  # the number of the list that is half of another one


class WrongExpression(Exception):
    """An expression cannot be compiled, as the message says."""

    def __init__(self, expression: str, problem: str) -> None:
        super().__init__(problem)
        self.expression = expression


class PatternMatcher:
    """Matches the expressions of one checkpoint in a process, which ends with this object.

    The process is sent each list once, and then names.
    """

    def __init__(self) -> None:
        self._left_s = TIME_LIMIT_S
        self._left_wall_s = WALL_LIMIT_S
        self._lists: list[Sequence[str]] = []
        self._sandbox = Sandbox(
            "paged_backend.quantization.pattern_process",
            subject="expression",
            time_limit_s=TIME_LIMIT_S,
            max_processes=1,
            answer_limit_s=WALL_LIMIT_S,  # a busy machine takes long for little processor time
        )

    def add(self, expressions: Sequence[str]) -> int:
        """Return the number that a list has from now on."""
        self._lists.append(expressions)
        return len(self._lists) - 1

    def first(self, number: int, name: str | None) -> int | None:
        """Return the index of the first expression of a list that the beginning of a name matches.

        Args:
            number: number of the list.
            name: name to match; None to compile the expressions, and match nothing.

        Raises:
            WrongExpression: one cannot be compiled.
            NoAnswer: all calls together have taken over `TIME_LIMIT_S`.
            RequestRefused: they have taken over `WALL_LIMIT_S`, or the expressions need too much
                memory, or something else ended the process again and again.
        """
        request = {"list": number, "name": name}
        answer = self._ask(request)
        if "is_unknown" in answer:  # the list is new, or the process is
            answer = self._ask({**request, "patterns": self._lists[number]})
        if "index" in answer:
            raise WrongExpression(self._lists[number][answer["index"]], answer["problem"])
        if "problem" in answer:
            raise RequestRefused("too_large", answer["problem"])
        first: int | None = answer["first"]
        return first

    def slowest(self, number: int, name: str | None) -> str:
        """Return the expression that takes longest, found by halves of the list; see `first`."""
        expressions = self._lists[number]
        while len(expressions) > 1:
            middle = len(expressions) // 2
            halves = expressions[:middle], expressions[middle:]
            expressions = max(halves, key=lambda half: self._seconds(half, name))
        return expressions[0]

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the answer of the process, within the time that is left."""
        started_s = time.monotonic()
        answer = self._sandbox.ask(request, time_limit_s=self._left_s)
        self._left_wall_s -= time.monotonic() - started_s
        self._left_s -= answer.get("seconds", 0.0)
        if self._left_s <= 0:
            raise NoAnswer("the expressions took too long")
        if self._left_wall_s <= 0:
            raise RequestRefused("too_slow", f"all names took over {WALL_LIMIT_S:g} s")
        return answer

    def _seconds(self, expressions: Sequence[str], name: str | None) -> float:
        request = {"list": _HALF, "name": name, "patterns": expressions}
        try:
            answer = self._sandbox.ask(request, time_limit_s=_SEARCH_S)
        except (NoAnswer, RequestRefused):
            return _SEARCH_S
        return float(answer.get("seconds", 0.0))


class Patterns:
    """Regular expressions under a key of a config.

    Args:
        config: the object that has the key.
        key: what messages name.
        expressions: the expressions.
        matcher: matches the expressions of the whole checkpoint.

    Raises:
        ConfigError: one is too long or wrong, or they take too long to compile.
    """

    def __init__(
        self, config: ConfigFile, key: str, expressions: Sequence[str], matcher: PatternMatcher
    ) -> None:
        self._config = config
        self._key = key
        self._expressions = list(expressions)
        self._matcher = matcher
        self._number = matcher.add(self._expressions)
        self._firsts: dict[str, int | None] = {}  # results for the names so far
        for expression in self._expressions:
            self._check_length(expression)
        if self._expressions:
            self._match(None)

    def first(self, name: str) -> int | None:
        """Return the index of the first expression that the beginning of a name matches.

        Raises:
            ConfigError: the names so far have taken too long.
        """
        if self._expressions and name not in self._firsts:
            self._firsts[name] = self._match(name)
        return self._firsts.get(name)

    def _match(self, name: str | None) -> int | None:
        try:
            return self._matcher.first(self._number, name)
        except WrongExpression as error:
            problem = f"holds a wrong expression, {shorten(error.expression)}: {error}"
        except NoAnswer:
            slow = self._matcher.slowest(self._number, name)
            problem = f"holds an expression that takes too long to match, {shorten(slow, 200)}: "
            problem += f"the names of all layers may take {TIME_LIMIT_S:g} s"
        except RequestRefused as error:
            problem = f"holds expressions that could not be matched: {error}"
        raise self._config.error(self._key, problem)

    def _check_length(self, expression: str) -> None:
        if len(expression) > MAX_LENGTH:
            problem = f"holds an expression of {len(expression)} characters; at most {MAX_LENGTH} "
            raise self._config.error(self._key, problem + "are supported")

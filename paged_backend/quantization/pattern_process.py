"""The process that matches patterns: ``python -P -m paged_backend.quantization.pattern_process``.

A pattern is a regular expression in a checkpoint, which can take any amount of time to compile and
for a short name, and Python holds the interpreter's lock meanwhile.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from paged_backend.sandbox.server import Answer, answer_lines, problem

TIME_LIMIT_S = 10.0  # seconds of processor time, for all names; real lists take milliseconds
MEMORY_LIMIT = 2**28  # bytes, in addition to what the process starts with


def main() -> None:
    """Answer each line of stdin until it is closed."""
    answer_lines(_prepare, time_limit_s=TIME_LIMIT_S, memory_limit=MEMORY_LIMIT)


def _prepare() -> Callable[[Any], Answer]:
    """Return the function that matches a name with a list, which is sent with the first name."""
    lists: dict[int, list[re.Pattern[str]]] = {}

    def answer(request: Any) -> Answer:
        number, name = request["list"], request["name"]
        started_s = time.process_time()
        if "patterns" in request:
            compiled = _compiled(request["patterns"])
            if isinstance(compiled, dict):
                return compiled
            lists[number] = compiled
        elif number not in lists:
            return {"is_unknown": True}
        matches = (i for i, pattern in enumerate(lists[number]) if pattern.match(name))
        first = None if name is None else next(matches, None)
        return {"first": first, "seconds": time.process_time() - started_s}

    return answer


def _compiled(patterns: Sequence[str]) -> list[re.Pattern[str]] | Answer:
    """Return compiled patterns, or what is wrong with one of them."""
    re.purge()  # the time of a list does not depend on the lists before it
    compiled = []
    for index, pattern in enumerate(patterns):
        try:
            compiled.append(re.compile(pattern))
        except (re.error, RecursionError, OverflowError) as error:
            return {**problem(str(error)), "index": index}
    return compiled


if __name__ == "__main__":
    main()

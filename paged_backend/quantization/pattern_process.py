"""The process that matches patterns: ``python -P -m paged_backend.quantization.pattern_process``.

A pattern is a regular expression in a checkpoint, which can take any amount of time for a short
name, and Python's `re` holds the interpreter's lock meanwhile.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from typing import Any

from paged_backend.sandbox.server import Answer, answer_lines

TIME_LIMIT_S = 10.0  # seconds of processor time, for all names; real lists take milliseconds
MEMORY_LIMIT = 2**28  # bytes, in addition to what the process starts with


def main() -> None:
    """Answer each line of stdin until it is closed."""
    answer_lines(_prepare, time_limit_s=TIME_LIMIT_S, memory_limit=MEMORY_LIMIT)


def _prepare() -> Callable[[Any], Answer]:
    compiled = functools.lru_cache(maxsize=None)(re.compile)

    def answer(request: Any) -> Answer:
        started_s = time.process_time()
        patterns = map(compiled, request["patterns"])
        matches = (index for index, one in enumerate(patterns) if one.match(request["name"]))
        return {"first": next(matches, None), "seconds": time.process_time() - started_s}

    return answer


if __name__ == "__main__":
    main()

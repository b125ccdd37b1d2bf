"""The process side of a sandbox: answers lines of stdin within limits of time and memory.

Only a separate process can limit the time and memory of work on untrusted input, because a single
call of a C function can use any amount of both. An empty line means that the process is ready.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from paged_backend.values.garbage import without_collections

Answer = dict[str, Any]
MAX_PROBLEM_LENGTH = 1000  # characters


def answer_lines(
    prepare: Callable[[], Callable[[Any], Answer]], *, time_limit_s: float, memory_limit: int
) -> None:
    """Answer each line of stdin with a line, a JSON object, until stdin is closed.

    A line begins with the time limit of its answer in seconds; a space and a JSON value follow.

    Args:
        prepare: imports and loads what is needed; returns the function that answers a request.
        time_limit_s: processor time of one answer; the process ends if it takes longer. A line
            may have a lower limit.
        memory_limit: bytes in addition to what the process uses after ``prepare``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the server
    # The default action, which ends a process at its time limit, may not have been inherited.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    with without_collections():
        answer = prepare()
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # so that nothing else writes between the answers
        _limit_memory(memory_limit)
        _send(answers, b"")
        for line in sys.stdin.buffer:
            limit, _, request = line.partition(b" ")
            signal.setitimer(signal.ITIMER_PROF, min(time_limit_s, float(limit)))
            reply = _answer(answer, request, memory_limit)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(answers, reply)


def problem(text: str) -> Answer:
    """Return the answer to a request that cannot be fulfilled."""
    return {"problem": text[:MAX_PROBLEM_LENGTH]}


def _answer(answer: Callable[[Any], Answer], line: bytes, memory_limit: int) -> bytes:
    try:
        reply = answer(json.loads(line))
    except MemoryError:
        reply = problem(f"it needs over {memory_limit // 2**20} MiB of memory")
    return json.dumps(reply).encode()


def _send(answers: BinaryIO, line: bytes) -> None:
    try:
        answers.write(line + b"\n")
        answers.flush()
    except BrokenPipeError:  # the client has ended
        os._exit(0)


def _limit_memory(memory_limit: int) -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + memory_limit
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

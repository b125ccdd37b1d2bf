"""The process that renders chat templates: ``python -P -m paged_backend.text.template_process``.

A template is a program in a checkpoint. The sandbox of `transformers` limits what it can access.
Only a separate process can limit its time and memory, because a single call of a C function can use
any amount of both. Requests and answers are lines of JSON; an empty line means that the process is
ready.
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

TIME_LIMIT_S = 2.0  # of processor time; real templates take milliseconds
MEMORY_LIMIT = 2**30  # bytes, in addition to what the process starts with
MAX_LENGTH = 2**26  # characters of a prompt


def main() -> None:
    """Answer each line of stdin until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the server
    # The default action, which ends a process at its time limit, may not have been inherited.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    from transformers.utils.chat_template_utils import render_jinja_template

    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # so that nothing else writes between the answers
        _limit_memory()
        _send(answers, b"")
        for line in sys.stdin.buffer:
            signal.setitimer(signal.ITIMER_PROF, TIME_LIMIT_S)
            answer = _answer(render_jinja_template, line)
            signal.setitimer(signal.ITIMER_PROF, 0)
            _send(answers, answer)


def _send(answers: BinaryIO, line: bytes) -> None:
    try:
        answers.write(line + b"\n")
        answers.flush()
    except BrokenPipeError:  # the client has ended
        os._exit(0)


def _limit_memory() -> None:
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + MEMORY_LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _answer(render: Callable[..., Any], line: bytes) -> bytes:
    """Render the template in ``line``; returns the text or an error."""
    try:
        (text,), _ = render(**json.loads(line))
        if len(text) > MAX_LENGTH:
            return _error(f"the chat template makes over {MAX_LENGTH} characters")
        return json.dumps({"text": text}).encode()
    except MemoryError:
        return _error(f"the chat template needs over {MEMORY_LIMIT // 2**20} MiB of memory")
    except Exception as error:  # templates may raise any exception
        return _error(f"the chat template says: {str(error).strip() or type(error).__name__}")


def _error(problem: str) -> bytes:
    return json.dumps({"problem": problem[:1000]}).encode()


if __name__ == "__main__":
    main()

"""The process that renders chat templates: ``python -P -m paged_backend.text.template_process``.

A template is a program in a checkpoint. The sandbox of `transformers` limits what it can access,
and this process limits its time and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paged_backend.sandbox.server import Answer, answer_lines, problem

TIME_LIMIT_S = 2.0  # processor time; real templates take milliseconds
MEMORY_LIMIT = 2**30  # bytes, in addition to what the process starts with
MAX_LENGTH = 2**22  # characters of a prompt; reading a longer answer would delay other threads


def main() -> None:
    """Answer each line of stdin until it is closed."""
    answer_lines(_prepare, time_limit_s=TIME_LIMIT_S, memory_limit=MEMORY_LIMIT)


def _prepare() -> Callable[[Any], Answer]:
    from paged_backend.text.template_renderer import TemplateRenderer  # imports jinja2

    renderer = TemplateRenderer()

    def answer(request: Any) -> Answer:
        if "check" in request:
            return {"text": renderer.check(request["check"])}
        try:
            text = renderer.render(request)
        except MemoryError:
            return problem(f"the chat template needs over {MEMORY_LIMIT // 2**20} MiB of memory")
        except Exception as error:  # templates may raise any exception
            return problem(f"the chat template says: {str(error).strip() or type(error).__name__}")
        if len(text) > MAX_LENGTH:
            return problem(f"the chat template makes over {MAX_LENGTH} characters")
        return {"text": text}

    return answer


if __name__ == "__main__":
    main()

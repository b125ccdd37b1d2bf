"""Progress bar of a run on stderr; silent if stderr is not a terminal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from paged_loadtest.timeline import Timeline

_REFRESHES_PER_S = 2  # drawing competes with the requests for CPU time


@contextlib.contextmanager
def progress_bar(label: str, num_requests: int) -> Iterator[Callable[[Timeline, float], None]]:
    """Yield a callback for finished requests: (timeline, seconds since the start of the run)."""
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[rate]:,.0f} tok/s"),
        TextColumn("[red]{task.fields[failed]}"),
        console=console,
        refresh_per_second=_REFRESHES_PER_S,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task(label, total=num_requests, rate=0.0, failed="")
        num_tokens = num_failed = 0

        def on_finished(timeline: Timeline, elapsed_s: float) -> None:
            nonlocal num_tokens, num_failed
            num_tokens += timeline.num_output_tokens
            num_failed += not timeline.is_success
            progress.update(
                task,
                advance=1,
                rate=num_tokens / elapsed_s,
                failed=f"{num_failed} failed" if num_failed else "",
            )

        yield on_finished

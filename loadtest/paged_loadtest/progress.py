"""Progress of a run on stderr: a bar on a terminal, and otherwise one line when it has ended."""

from __future__ import annotations

import contextlib
import sys
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
        num_tokens = num_failed = num_finished = 0
        run_s = 0.0

        def on_finished(timeline: Timeline, elapsed_s: float) -> None:
            nonlocal num_tokens, num_failed, num_finished, run_s
            num_finished, run_s = num_finished + 1, elapsed_s
            num_tokens += timeline.num_output_tokens
            num_failed += not timeline.is_success
            progress.update(
                task,
                advance=1,
                rate=num_tokens / elapsed_s,
                failed=f"{num_failed} failed" if num_failed else "",
            )

        yield on_finished
        if not console.is_terminal:
            done = f"{num_finished} of {num_requests} requests in {run_s:.1f} s"
            print(f"{label}: {done}", file=sys.stderr, flush=True)

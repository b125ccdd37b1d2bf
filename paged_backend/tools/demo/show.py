"""Sends three questions at once to a real server; prints the streamed answers and the metrics."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from paged_client import Client, Completion, CompletionBuilder
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server
from paged_backend.launch.storage import temporary_folder
from paged_backend.tools.demo import SYSTEM_PROMPT, Question, load_questions
from paged_backend.tools.scrape import MetricsWatch, Scrape

NAMES = ("os.path.join", "textwrap.dedent", "math.isclose")
COLORS = ("cyan", "magenta", "green")
REFRESH_PER_S = 30
INTERVAL_S = 0.01  # time between two readings of the metrics
SETTLE_S = 0.2  # the server publishes the last counts a moment after the last response
PANEL_HEIGHT = 6
METRICS = (
    *("prefix_cache_hits_total", "prefix_cache_queries_total"),
    *("kv_blocks_used", "kv_cache_utilization_perc"),
)


def show() -> int:
    """Start a server, ask the questions and print the answers; return 1 if one is wrong, else 0.

    Raises:
        LaunchError: the server did not start.
    """
    console = Console()
    with demo_server(console, "demo") as server:
        status = _ask(console, server.grpc_url, server.metrics_url)
    console.print(
        f"To ask it yourself, run `paged-backend serve demo` and `paged-backend generate "
        f'"{load_questions()[0].question}"`. It knows {len(load_questions())} functions of '
        "Python's standard library and nothing else."
    )
    return status


@contextmanager
def demo_server(console: Console, model: str) -> Iterator[RunningServer]:
    """Start a server of a bundled model, and print where it is.

    Raises:
        LaunchError: the server did not start.
    """
    with temporary_folder() as folder:
        write_model_repository(folder, "paged_llm", {"model": model}, instances=1)
        console.print(f"Starting tritonserver with the bundled model {model} ...")
        started = time.monotonic()
        with start_server(folder) as server:
            console.print(
                f"Ready after {time.monotonic() - started:.0f} s: HTTP {server.http_url}, "
                f"gRPC {server.grpc_url}, metrics {server.metrics_url}\n",
                soft_wrap=True,
            )
            yield server


@dataclass(slots=True)
class ShownStream:
    """One stream on the screen."""

    question: Question
    prompt: str
    color: str
    text: str = ""
    completion: Completion | None = None

    def follow(self, client: Client) -> None:
        """Stream the answer to its end."""
        builder = CompletionBuilder()
        with client.stream(self.prompt, temperature=0, max_tokens=64) as stream:
            for chunk in stream:
                builder.add(chunk)
                self.text += chunk.text
        self.completion = builder.build()

    @property
    def is_right(self) -> bool:
        """Whether the answer is complete and exactly the expected one."""
        return self.completion is not None and self.completion.text == self.question.answer

    def panel(self) -> Panel:
        """The panel that shows this stream."""
        return Panel(self.text, title=self.question.name, style=self.color, height=PANEL_HEIGHT)


def _ask(console: Console, grpc_url: str, metrics_url: str) -> int:
    conversations = _conversations()
    watch = MetricsWatch(metrics_url, METRICS, interval_s=INTERVAL_S)
    with Client(grpc_url, timeout=60) as client, watch:
        threads = [threading.Thread(target=c.follow, args=(client,)) for c in conversations]
        started = time.perf_counter()
        show_while(console, threads, lambda: [c.panel() for c in conversations])
        seconds = time.perf_counter() - started
        time.sleep(SETTLE_S)
    console.print()
    console.print(_streams_table(conversations))
    pages = [page for _, page in watch.readings]
    console.print(_server_table(conversations, pages, seconds))
    return report_wrong(console, [c.question.name for c in conversations if not c.is_right])


def show_while(
    console: Console, threads: list[threading.Thread], panels: Callable[[], list[Panel]]
) -> None:
    """Start the threads, and show panels side by side until the threads have ended."""
    with Live(console=console, refresh_per_second=REFRESH_PER_S) as live:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            live.update(_side_by_side(panels()))
            time.sleep(1 / REFRESH_PER_S)
        live.update(_side_by_side(panels()))


def report_wrong(console: Console, wrong: list[str]) -> int:
    """Print what is wrong; returns the exit status, 1 if anything is wrong."""
    if wrong:
        console.print(f"[red]Wrong or incomplete: {', '.join(wrong)}[/red]")
    return 1 if wrong else 0


def _side_by_side(panels: list[Panel]) -> Table:
    grid = Table.grid(expand=True)
    for _ in panels:
        grid.add_column(ratio=1)
    grid.add_row(*panels)
    return grid


def _conversations() -> list[ShownStream]:
    from transformers import AutoTokenizer  # slow to import; the server loads meanwhile

    template = AutoTokenizer.from_pretrained(MODEL_DIR).apply_chat_template
    by_name = {question.name: question for question in load_questions()}
    conversations = []
    for name, color in zip(NAMES, COLORS, strict=True):
        messages = [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": by_name[name].question},
        ]
        prompt = str(template(messages, tokenize=False, add_generation_prompt=True))
        conversations.append(ShownStream(by_name[name], prompt, color))
    return conversations


def _streams_table(conversations: list[ShownStream]) -> Table:
    table = Table("stream", "prompt", "output", "TTFT ms", "ITL ms", "tokens/s", "right")
    for conversation in conversations:
        completion = conversation.completion
        if completion is not None:
            table.add_row(
                conversation.question.name,
                str(completion.num_input_tokens),
                str(completion.num_output_tokens),
                f"{completion.ttft_s * 1e3:.0f}",
                f"{statistics.median(completion.itl_s or (0.0,)) * 1e3:.1f}",
                f"{completion.num_output_tokens / completion.latency_s:.0f}",
                "yes" if conversation.is_right else "no",
            )
    return table


def _server_table(conversations: list[ShownStream], pages: list[Scrape], seconds: float) -> Table:
    total = sum(c.completion.num_output_tokens for c in conversations if c.completion is not None)
    hits, queries = (pages[-1].value(f"prefix_cache_{kind}_total") for kind in ("hits", "queries"))
    peak = max(pages, key=lambda page: page.value("kv_blocks_used"))
    table = Table(show_header=False)
    table.add_row("all streams", f"{total / seconds:.0f} tokens/s")
    table.add_row(
        "prefix-cache hit rate", f"{hits:.0f} of {queries:.0f} prompt tokens ({hits / queries:.0%})"
    )
    table.add_row(
        "KV utilization at the peak",
        f"{peak.value('kv_cache_utilization_perc'):.0%} of the slots of "
        f"{peak.value('kv_blocks_used'):.0f} blocks",
    )
    return table

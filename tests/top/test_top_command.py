"""``paged-backend top`` as a user starts it: once, in a terminal, and with nothing to watch."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from metrics_page import read_metrics
from paged_client import Client, RequestCancelled

from paged_backend.cli import main
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, launch_server

TOP = [sys.executable, "-m", "paged_backend.cli", "top"]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
NUM_STREAMS = 5
PREFIX = [7 + 3 * n % 300 for n in range(64)]  # four blocks


class Terminal:
    """A terminal of 100x30 with a program in it."""

    def __init__(self, argv: list[str]) -> None:
        self.fd, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.inside = inside
        self.before = termios.tcgetattr(inside)
        self.process = subprocess.Popen(
            argv, stdin=inside, stdout=inside, stderr=inside, env=os.environ | {"TERM": "xterm"}
        )
        self.seen = ""

    def wait_for(self, text: str, timeout_s: float = 120) -> None:
        """Read until a text comes that has not come before."""
        deadline = time.monotonic() + timeout_s
        while text not in self.seen:
            assert time.monotonic() < deadline, f"no {text!r} in {self.seen[-6000:]}"
            if select.select([self.fd], [], [], 0.1)[0]:
                self.seen += CONTROL.sub("", os.read(self.fd, 2**16).decode(errors="replace"))
        self.seen = self.seen.partition(text)[2]

    def press(self, keys: str) -> None:
        os.write(self.fd, keys.encode())


@contextmanager
def top_in_a_terminal(*flags: str) -> Iterator[Terminal]:
    terminal = Terminal([*TOP, *flags])
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.fd)
        os.close(terminal.inside)


@contextmanager
def shared_prefix_load(grpc_url: str, metrics_url: str) -> Iterator[None]:
    """Streams that run until the end, all with one prefix."""

    def follow(stream):
        with pytest.raises(RequestCancelled):
            for _ in stream:
                pass

    with Client(grpc_url) as client, ExitStack() as stack:
        client.generate(PREFIX, max_tokens=1)  # so that the others find it in the cache
        for number in range(NUM_STREAMS):
            params = {"temperature": 0, "max_tokens": 1900, "ignore_eos": True}
            stream = client.stream([*PREFIX, 10 + number], **params)
            thread = threading.Thread(target=follow, args=(stream,))
            stack.callback(thread.join)
            stack.callback(stream.cancel)
            thread.start()
        while read_metrics(metrics_url)["num_requests_running"] != NUM_STREAMS:
            time.sleep(0.01)
        yield


def flags_of(server: RunningServer, interval_s: float) -> list[str]:
    urls = ["--url", server.grpc_url, "--metrics-url", server.metrics_url]
    return [*urls, "--interval", str(interval_s)]


@pytest.mark.server
def test_sharing_is_seen_on_a_real_server_that_comes_and_goes(tmp_path, capsys):
    options = {"model": "demo", "enable_inspect": True}
    write_model_repository(tmp_path, "paged_llm", options, instances=1)
    with launch_server(tmp_path) as server:
        os.kill(server.pid, signal.SIGSTOP)  # until it has been asked in vain
        with top_in_a_terminal(*flags_of(server, 0.2)) as terminal:
            terminal.wait_for("NO ANSWER YET, trying on")
            terminal.wait_for("cannot read metrics at " + server.metrics_url)
            os.kill(server.pid, signal.SIGCONT)
            server.wait_until_ready(120)
            terminal.wait_for("engine up")
            look_at_what_is_shared(server, capsys)
            server.kill()
            terminal.wait_for("NO ANSWER for ")
            terminal.wait_for("cannot read metrics at " + server.metrics_url)
            terminal.process.send_signal(signal.SIGINT)
            assert terminal.process.wait(60) == 0


def look_at_what_is_shared(server: RunningServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Once, and in a terminal that has been as it is before."""
    flags = flags_of(server, 0.5)
    with shared_prefix_load(server.grpc_url, server.metrics_url):
        run = subprocess.run(
            [*TOP, *flags, "--once"],
            env=os.environ | {"COLUMNS": "120", "LINES": "40"},
            capture_output=True,
            text=True,
            check=True,
        )
        lines = run.stdout.splitlines()
        with top_in_a_terminal(*flags) as terminal:
            terminal.wait_for(f"2-9 + shared 4, saving {4 * (NUM_STREAMS - 1)}")
            terminal.press("x")
            terminal.wait_for("5 running")
            terminal.press("q")
            assert terminal.process.wait(60) == 0
            assert termios.tcgetattr(terminal.inside) == terminal.before
        assert main(["top", "--once", *flags, "--model", "nobody"]) == 2
        assert "no engine of the model 'nobody'; it has: paged_llm" in capsys.readouterr().err
        assert main(["top", "--once", *flags, "--url", "127.0.0.1:1"]) == 0
        shown = capsys.readouterr().out
        assert "5 running" in shown and "Cannot ask for the blocks at 127.0.0.1:1" in shown
    assert "5 running, 0 waiting" in run.stdout
    tables = [line.split()[-1] for line in lines if "decode" in line]
    assert sorted(table[:5] for table in tables) == [
        "5555a",
        "5555b",
        "5555c",
        "5555d",
        "5555e",
    ]
    assert sum("5" in line for line in lines if line.startswith("│    1 ")) == 1
    assert all(len(line) <= 120 for line in lines) and len(lines) <= 40
    rate = re.search(r"output +([\d,]+) tokens/s", run.stdout)
    assert rate is not None and int(rate[1].replace(",", "")) > 0


@pytest.mark.server
def test_a_server_that_shows_no_blocks_is_said_to_need_an_option(server, capsys):
    assert main(["top", "--once", *flags_of(server.running, 0.2)]) == 0
    shown = capsys.readouterr().out
    assert "start it with --enable-inspect" in shown


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--once", "--metrics-url", "http://127.0.0.1:1/metrics"], "cannot read metrics at http"),
        (["--once", "--metrics-url", "nowhere"], "cannot read metrics at nowhere: unknown url"),
        (["--interval", "0"], "option interval must be a number from 0.1 up to 60, got 0.0"),
        (
            ["--url", "localhost"],
            "option url must be host:port of a gRPC endpoint, got 'localhost'",
        ),
        (["--url", "http://127.0.0.1:8001"], "option url must be host:port of a gRPC endpoint"),
        ([], "top: stdout is not a terminal; --once prints one frame anywhere"),
    ],
)
def test_mistakes_are_one_line(capsys, flags, message):
    assert main(["top", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"paged-backend: error: {message}")

"""Locust as users run it, against a real server and gateway: what it counts is what they count."""

from __future__ import annotations

import csv
import json
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from demo_server import Server

from paged_backend.launch.ports import bind

pytestmark = pytest.mark.server

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"
LOCUST = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE)]
PROTOCOLS = ("HTTP", "OpenAI", "gRPC")
SHORT = ("--input-len", "16", "--output-len", "uniform:min=8,max=40")


@pytest.fixture
def addresses(targets) -> tuple[str, ...]:
    return (
        *("--grpc-url", targets.server.running.grpc_url),
        *("--http-url", targets.server.running.http_url),
        *("--openai-url", f"{targets.gateway}/v1"),
    )


def run(*flags: str, headless: bool = True) -> subprocess.CompletedProcess[str]:
    command = [*LOCUST, "--only-summary", *(["--headless"] if headless else []), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )


@contextmanager
def workers(port: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Two, which are to end when their master does."""
    command = [*LOCUST, "--worker", "--master-port", str(port)]
    pipes = {"stdin": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        yield started
        for process in started:
            _, log = process.communicate(timeout=120)
            assert process.returncode == 0, log
    finally:
        for process in started:
            process.kill()


def free_port() -> int:
    with bind("127.0.0.1", 0, "port") as socket:
        return int(socket.getsockname()[1])


def totals(line: str) -> tuple[int, int, int]:
    """Tokens, requests and failures of the line at the end."""
    found = re.search(r"^(\d+) output tokens in .* a second; (\d+) calls, (\d+) failed", line, re.M)
    assert found, line
    tokens, num_requests, failed = map(int, found.groups())
    return tokens, num_requests, failed


def rows(prefix: Path) -> dict[tuple[str, str], dict[str, str]]:
    with open(f"{prefix}_stats.csv") as file:
        return {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}


def seconds(row: dict[str, str]) -> float:
    """All times of a row together."""
    unit = 1e3 if "(ms)" in row["Name"] else 1e6
    return int(row["Request Count"]) * float(row["Average Response Time"]) / unit


class Counted:
    """What the server has counted since this was made."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = self._settled()

    def __getitem__(self, name: str) -> float:
        return self._settled()[name] - self._before[name]

    def _settled(self) -> dict[str, float]:
        """The counts once nothing goes on, a request that an earlier test gave up included."""
        self._server.wait_for("kv_blocks_used", 0)
        time.sleep(0.6)  # a front-end that has nothing to do looks up twice a second
        return self._server.metrics()


def test_counts_what_the_server_counts_over_all_protocols(server, addresses, tmp_path):
    prefix, report = tmp_path / "run", tmp_path / "run.html"
    # A busy machine needs longer until each protocol has an answer.
    for duration in ("1s", "3s", "60s"):
        counted = Counted(server)
        flags = ("-u", "6", "-r", "60", "-t", duration, "--csv", prefix, "--html", report)
        done = run(*flags, *addresses)
        tokens, num_requests, failed = totals(done.stdout)
        assert (done.returncode, failed) == (0, 0), done.stderr
        assert tokens == counted["generation_tokens_total"]
        table = rows(prefix)
        if all((protocol, "TPOT (us)") in table for protocol in PROTOCOLS):
            break
    assert sum(int(table[p, "output tokens"]["Request Count"]) for p in PROTOCOLS) == tokens
    assert int(table["", "Aggregated"]["Request Count"]) == num_requests
    for protocol in PROTOCOLS:
        e2e, ttft = table[protocol, "E2E (ms)"], table[protocol, "TTFT (us)"]
        assert int(e2e["Request Count"]) == int(ttft["Request Count"]) > 0
        assert 0 < int(ttft["50%"]) <= int(ttft["99%"]) < 1e3 * float(e2e["Max Response Time"])
        # The first token and all gaps after it are the whole request, in whichever unit.
        # Each gap between tokens is counted in whole microseconds.
        itl_s = seconds(table[protocol, "ITL (us)"])
        assert seconds(e2e) == pytest.approx(seconds(ttft) + itl_s, rel=1e-3)
        assert 0 < int(table[protocol, "TPOT (us)"]["50%"])
        assert f'"{protocol}"' in report.read_text()
    assert "TTFT (us)" in report.read_text()


@pytest.mark.thorough
def test_counts_as_exactly_on_two_workers(server, addresses, tmp_path):
    counted, port = Counted(server), free_port()
    with workers(port):
        done = run(
            *("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(port)),
            *("--expect-workers", "2", "-u", "6", "-r", "6", "-t", "2s"),
            *("--csv", tmp_path / "run", *addresses),
        )
    tokens, num_requests, failed = totals(done.stdout)
    assert (done.returncode, failed) == (0, 0), done.stderr
    assert tokens == counted["generation_tokens_total"] > 0
    assert int(rows(tmp_path / "run")["", "Aggregated"]["Request Count"]) == num_requests


def test_requests_cut_off_at_the_end_are_failures(server, addresses):
    counted = Counted(server)
    done = run(*"-u 6 -r 60 -t 1s -s 0 --output-len 200".split(), *addresses)
    tokens, _, failed = totals(done.stdout)
    assert done.returncode == 1
    assert f"{failed} of them were cut off" in done.stdout
    assert 0 < failed <= 6
    assert tokens <= counted["generation_tokens_total"] <= tokens + failed * 200


@pytest.mark.soak
def test_users_that_leave_in_a_burst_leave_their_requests_to_end(server, addresses):
    counted = Counted(server)
    burst = "-u 8 -t 7s --shape burst --burst-every 3 --burst-length 1 --output-len 150"
    done = run(*burst.split(), *addresses)
    tokens, _, failed = totals(done.stdout)
    assert (done.returncode, failed) == (0, 0), done.stderr
    assert tokens == counted["generation_tokens_total"] > 0
    changes = re.findall(r"Shape test updating to (\d+) users", done.stderr)
    assert changes[:4] == ["1", "8", "1", "8"]


@pytest.mark.soak
def test_requests_at_a_rate_wait_for_no_answer(server, addresses):
    counted = Counted(server)
    # Three users who waited for answers could not send so many.
    flags = "-u 3 -r 3 -t 5s --request-rate 12 --output-len 120"
    done = run(*flags.split(), *addresses)
    tokens, num_requests, failed = totals(done.stdout)
    assert (done.returncode, failed) == (0, 0), done.stderr
    assert 30 <= num_requests <= 90
    assert tokens == counted["generation_tokens_total"] == 120 * num_requests


@pytest.mark.thorough
def test_ramp_ends_when_more_users_bring_no_more(addresses):
    flags = "-u 64 -t 60s --shape ramp --ramp-step 1 --ramp-gain 1"  # which no step can keep up
    done = run(*flags.split(), *SHORT, *addresses)
    assert done.returncode == 0, done.stderr
    assert "saturated" in done.stderr


@pytest.mark.soak
def test_trace_is_replayed_once_at_its_times(server, addresses, tmp_path):
    counted, path = Counted(server), tmp_path / "trace.jsonl"
    lengths = [(10 + index, 5 + index) for index in range(20)]
    entries = [
        {"timestamp": 100 * n, "input_length": given, "output_length": wanted, "hash_ids": [n]}
        for n, (given, wanted) in enumerate(lengths)
    ]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    port = free_port()
    with workers(port):
        done = run(
            *("--master", "--master-bind-host", "127.0.0.1", "--master-bind-port", str(port)),
            *("--expect-workers", "2", "-u", "6"),
            *("--dataset-name", "trace", "--dataset-path", path, *addresses),
        )
    tokens, num_requests, failed = totals(done.stdout)
    assert (done.returncode, num_requests, failed) == (0, 20, 0), done.stderr
    assert tokens == counted["generation_tokens_total"] == sum(wanted for _, wanted in lengths)
    assert counted["prompt_tokens_total"] == sum(given for given, _ in lengths)


@pytest.mark.soak
def test_conversations_go_on_over_chats(server, addresses):
    counted = Counted(server)
    flags = "-u 3 -r 3 -t 4s --dataset-name conversations --tokenizer demo --num-prompts 20"
    done = run(*flags.split(), *addresses)
    tokens, num_requests, failed = totals(done.stdout)
    assert (done.returncode, failed) == (0, 0), done.stderr
    assert tokens == counted["generation_tokens_total"] > 0
    assert counted["prefix_cache_hits_total"] > 0  # later turns begin as earlier ones did


@pytest.mark.soak
def test_tags_and_classes_choose_protocols(addresses, tmp_path):
    done = run("-t", "1s", "--tags", "http", "--csv", tmp_path / "tags", *SHORT, *addresses)
    assert done.returncode == 0, done.stderr
    assert {kind for kind, _ in rows(tmp_path / "tags")} == {"HTTP", ""}
    # Without the class nobody looks for a gateway.
    flags = ("--openai-url", "127.0.0.1:1", *SHORT)
    done = run("-t", "1s", "--csv", tmp_path / "classes", *addresses, *flags, "GrpcUser")
    assert done.returncode == 0, done.stderr
    assert {kind for kind, _ in rows(tmp_path / "classes")} == {"gRPC", ""}


NO_MODEL = "has no model 'nope' that is ready; ready there: "
# Mistakes of other users or options that the same lines of code find.
LIKE_OTHERS = [
    (["--grpc-url", "127.0.0.1:1"], "--grpc-url: nobody answers at 127.0.0.1:1"),
    (["--openai-url", "127.0.0.1:1"], "--openai-url: nobody answers at http://127.0.0.1:1"),
    (["--model", "nope", "HttpUser"], NO_MODEL),
    (["--model", "nope", "OpenAIUser"], NO_MODEL),
    (["--tags", "nope"], "the tags are grpc, http, openai"),
    (["--input-len", "9999"], "request 1 does not fit"),
]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--http-url", "127.0.0.1:1"], "--http-url: nobody answers at http://127.0.0.1:1"),
        (["--model", "nope", "GrpcUser"], NO_MODEL),
        (["--floor", "3"], "option floor must be a number from 0 up to 1, got 3"),
        (["--dataset-name", "trace", "--dataset-path", "BAD"], "BAD:2: needs a JSON object"),
        *(pytest.param(*case, marks=pytest.mark.thorough) for case in LIKE_OTHERS),
    ],
)
def test_bad_input_is_one_line(addresses, tmp_path, flags, says):
    bad = tmp_path / "bad.jsonl"
    line = {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [1]}
    bad.write_text(json.dumps(line) + '\n{"timestamp": 1}\n')
    done = run("-t", "5s", *addresses, *[str(bad) if flag == "BAD" else flag for flag in flags])
    assert done.returncode == 2
    (complaint,) = [text for text in done.stderr.splitlines() if not text.startswith("[")]
    assert complaint.startswith("locust: error: ")
    assert says.replace("BAD", str(bad)) in complaint


@pytest.mark.soak
def test_worker_that_cannot_prepare_ends_the_run(addresses, tmp_path):
    port, trace = free_port(), tmp_path / "trace.jsonl"
    line = {"timestamp": 9000, "input_length": 1, "output_length": 1, "hash_ids": [1]}
    trace.write_text(json.dumps(line) + "\n" + json.dumps(line | {"timestamp": 60_000}) + "\n")
    master = [*LOCUST, "--headless", "--only-summary", "--master", "--expect-workers", "2"]
    master += ["--master-bind-host", "127.0.0.1", "--master-bind-port", str(port)]
    master += ["--dataset-name", "trace", "--dataset-path", str(trace), *addresses]
    with subprocess.Popen(master, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        while "Waiting for workers" not in line:  # it has read the file
            assert line, "it ended"
            line = process.stderr.readline()
        trace.unlink()
        with workers(port):
            _, log = process.communicate(timeout=60)
    assert process.returncode == 2, log
    assert re.match("locust: error: cannot read .* worker", log.splitlines()[-1])


PAGED_BACKEND = Path(sys.executable).parent / "paged-backend"
OWN_NETWORK = ("unshare", "--user", "--map-root-user", "--net")
# A new network has a loopback device that is down; the default ports are free there.
UP = """
import fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh22x", b"lo", 0x49))
os.execvp(sys.argv[1], sys.argv[1:])
"""
BESIDE_SERVE = """
{serve} > ready &
until grep -q "is ready" ready; do kill -0 $! || exit 9; sleep 0.1; done
{locust} 2> all; echo $? > all.status
{locust} OpenAIUser 2> named; echo $? > named.status
kill -INT $!; wait
"""


@pytest.mark.skipif(
    bool(subprocess.run([*OWN_NETWORK, "true"], capture_output=True).returncode),
    reason="this user cannot make a network",
)
def test_users_of_a_door_that_does_not_answer_are_left_out_unless_named(tmp_path):
    """As the README has it, beside `make serve`, where no gateway runs."""
    locust = [*LOCUST, "--headless", "--only-summary", "-u", "4", "-r", "40", "-t", "1s", *SHORT]
    script = BESIDE_SERVE.format(
        serve=shlex.join([str(PAGED_BACKEND), "serve", "demo"]), locust=shlex.join(locust)
    )
    command = [*OWN_NETWORK, sys.executable, "-c", UP, "sh", "-c", script]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=200)
    log = (tmp_path / "all").read_text()
    assert (tmp_path / "all.status").read_text() == "0\n", log
    assert "OpenAIUser is left out: --openai-url: nobody answers at http://127.0.0.1:9000" in log
    assert "GrpcUser is left out" not in log and "HttpUser is left out" not in log
    tokens, num_requests, failed = totals(done.stdout)
    assert tokens > 0 and num_requests > 0 and failed == 0
    assert (tmp_path / "named.status").read_text() == "2\n"
    complaint = (tmp_path / "named").read_text().splitlines()[-1]
    assert complaint.startswith("locust: error: --openai-url: nobody answers at http://127.0.0.1:9")


SWALLOWING = f"""
import sys
sys.path.insert(0, {str(LOCUSTFILE.parent)!r})
import gevent
from locust import events
from locustfile import *

@events.init.add_listener
def swallow_interrupts(**_):
    gevent.spawn(run)

def run():
    while True:
        try:
            sum(range(200_000))
        except BaseException:
            pass
        gevent.sleep(0.001)
"""


def test_web_page_shows_a_run_and_stops_it(server, addresses, tmp_path):
    """Ctrl-C is heard, too, where a greenlet that is running would have swallowed it."""
    (tmp_path / "swallowing.py").write_text(SWALLOWING)
    locust = [*LOCUST[:-1], str(tmp_path / "swallowing.py")]
    counted, port = Counted(server), free_port()
    page = f"http://127.0.0.1:{port}"
    command = [*locust, "--web-host", "127.0.0.1", "--web-port", str(port), *SHORT, *addresses]
    command += ["-u", "6", "-r", "6", "--autostart"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, **pipes) as process:
        line = process.stderr.readline()
        while "All users spawned" not in line:
            assert line, "it ended"
            line = process.stderr.readline()
        assert "<!doctype html>" in ask(page + "/").lower()
        expected = {(protocol, "TTFT (us)") for protocol in PROTOCOLS}
        names: set[tuple[str, str]] = set()
        deadline = time.monotonic() + 60
        while not expected <= names:
            assert time.monotonic() < deadline, names
            time.sleep(0.2)
            shown = json.loads(ask(page + "/stats/requests"))
            names = {(row["method"], row["name"]) for row in shown["stats"]}
        ask(page + "/stop", b"")
        process.send_signal(signal.SIGINT)
        out, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    assert shown["state"] == "running" and shown["errors"] == []
    assert totals(out)[0] == counted["generation_tokens_total"] > 0


def ask(url: str, body: bytes | None = None) -> str:
    with urllib.request.urlopen(url, body, timeout=60) as response:
        return response.read().decode()

"""Generated requests at four interfaces while good streams run: nothing breaks or leaks.

`FUZZ_SEEDS=1,2,3 FUZZ_MINUTES=10` are the defaults of the long one. Rounds of a seed are the same
each time: `FUZZ_SEEDS=2:17` sends round 17 of seed 2 once, which is how a finding is repeated.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from bad_requests import INFERS, MARK, MARK_IDS, POSTS, RAW, Case
from effort import ALL
from gateway.gateways import Gateway, running_gateway
from gateway_requests import GATEWAY_CASES, KEY_FILE, KEYS, Ask, Bytes, send
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from paged_client import Client
from paged_client.routing import MAX_CHARACTERS, MAX_PIECES, MAX_REMEMBERED
from servers import MODEL, metrics, processes_of, restarts, serve_demo, wait_for
from test_bad_requests import INTERNAL, PATH, Wire

from paged_backend.launch.server_process import RunningServer
from paged_backend.tools.demo import Question, load_questions

pytestmark = pytest.mark.server

SEEDS = os.environ.get("FUZZ_SEEDS", "1,2,3")
MINUTES = float(os.environ.get("FUZZ_MINUTES", "10"))
WARM_UP_SEED = 0
WARM_UP_PART = 0.1  # share of the time, before it
AGAIN_PART = 0.3  # share of the time, after it: the first rounds once more
BATCH = 10  # sent at once
ROUND = 20  # batches
SHORT_ROUND = 20 if ALL else 8
MORE_MIB = 8.0  # for each role, by requests that it has had before
GOOD_TIMEOUT_S = 60.0
GOOD_PAUSE_S = 0.1  # between two requests of a good stream; leaves CPU time for the bad ones
SETTLE_S = 60.0
CALM_S = 1.0
MORE_THREADS = 2  # threads of tritonserver, whose front-ends keep a few in reserve
SHOWN = 4  # findings of each kind
QUESTIONS = load_questions()[:4]

# Left to itself glibc has an arena for each few threads, and each keeps the most that it ever held.
GLIBC = {
    **{"MALLOC_ARENA_MAX": "1", "PYTHONMALLOC": "malloc"},
    **{"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
}
ANSWERS = {200, 400, 401, 404, 405, 408, 413, 415, 431, 504}  # statuses of a gateway, to anything
ROLES = {
    "tritonserver": "bin/tritonserver",
    "front-ends": "backend_stub",
    "engine": "engine_process",
    "template process": "template_process",
    "gateways": "paged_backend.cli",
}
# What a log may not hold. The ids are those of a prompt; they stand in no log side by side.
_BAD_WORDS = [
    *("Traceback", "Exception", "never retrieved", "never awaited", "was destroyed", "unclosed"),
    "without completing response",
    *("internal error", re.escape(MARK), rf"{MARK_IDS[0]}\D{{1,3}}{MARK_IDS[1]}"),
    *(re.escape(text) for q in QUESTIONS for text in (q.question, q.answer)),
]
BAD_WORDS = re.compile("|".join(_BAD_WORDS), re.IGNORECASE)


class Wrong(Exception):
    """An answer that a case must not have."""


class Finding(NamedTuple):
    """What went wrong, and what repeats it."""

    problem: str
    round: str  # seed:number
    cases: Sequence[Case | Ask | Bytes]

    @property
    def kind(self) -> str:
        """The same for findings that probably have the same cause."""
        return re.sub(r"0x[0-9a-f]+|\d+|b?'[^']*'", "#", self.problem)[:100]

    def __str__(self) -> str:
        length = 2000 // len(self.cases) if self.cases else 0
        shown = "\n".join(f"    {_short(case, length)}" for case in self.cases)
        return f"{self.problem}\n    FUZZ_SEEDS={self.round}\n{shown}"


def _short(case: Case | Ask | Bytes, length: int) -> str:
    text = " ".join(repr(case).split())
    return text if len(text) <= length else f"{text[:length]} ... {text[-100:]}"


class Logs:
    """Files that grow, and what in them must not be there."""

    def __init__(self, *files: Path) -> None:
        self._files = dict.fromkeys(files, 0)

    def bad_lines(self) -> list[str]:
        """What is new since the last call and holds one of the bad words."""
        bad = []
        for file, begin in self._files.items():
            with file.open("rb") as log:
                log.seek(begin)
                new = log.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._files[file] = begin + len(whole)
            lines = whole.decode(errors="replace").splitlines()
            bad += [f"{file.name}: {line[:300]}" for line in lines if BAD_WORDS.search(line)]
        return bad


@dataclass
class Fuzz:
    """A server, two gateways in front of it, and what has been sent to them so far."""

    server: RunningServer
    open_gateway: Gateway
    keyed_gateway: Gateway
    logs: Logs
    num_batches: int  # batches of a round
    seen: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: list[Finding] = field(default_factory=list)
    rounds: Counter[str] = field(default_factory=Counter)
    good: Counter[str] = field(default_factory=Counter)
    mib: list[dict[str, float]] = field(default_factory=list)  # by role, after each round
    took_s: float = 0.0

    def run(self, seeds: Sequence[str], duration_s: float, *, again: bool = False) -> None:
        """Send rounds of each seed in its part of the time; ``seed:number`` is one round.

        With ``again`` only rounds that have been sent before.
        """
        started = time.monotonic()
        for index, name in enumerate(seeds):
            number, _, only = name.partition(":")
            until = started + duration_s * (index + 1) / len(seeds)
            most = self.rounds[number] if again else sys.maxsize
            for round_ in [int(only)] if only else range(most):
                self._round(int(number), round_)
                self.rounds[number] = max(self.rounds[number], round_ + 1)
                self.mib.append({role: held.mib for role, held in holdings(self).items()})
                if time.monotonic() > until:
                    break
        self.took_s += time.monotonic() - started

    def _round(self, seed_number: int, round_: int) -> None:
        name = f"{seed_number}:{round_}"
        wire = Wire(self.server)
        with ThreadPoolExecutor(BATCH) as pool:

            @seed(seed_number * 1_000_003 + round_)
            @settings(
                max_examples=self.num_batches,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(st.lists(_ANY, min_size=BATCH, max_size=BATCH))
            def send_batch(cases: list[Case | Ask | Bytes]) -> None:
                found = list(pool.map(lambda case: self._send(wire, case), cases))
                for case, problem in zip(cases, found, strict=True):
                    if problem is not None:
                        self.findings.append(Finding(problem, name, [case]))
                self._look_at_logs(wire, name, cases)

            send_batch()
        for kind, number in wire.seen.items():
            self.seen["Triton"][kind] += number
        wire.close()

    def _look_at_logs(self, wire: Wire, name: str, cases: Sequence[Case | Ask | Bytes]) -> None:
        """After a batch; where a log shows something, each case is sent again alone."""
        lines = self.logs.bad_lines()
        if not lines:
            return
        # What tells something of a prompt is worse than what stands around it.
        worst = next((line for line in lines if MARK in line.lower()), lines[-1])
        found = Finding(worst, name, cases)
        if found.kind not in {finding.kind for finding in self.findings}:
            guilty = [case for case in cases if self._is_logged(wire, case)]
            found = found._replace(cases=guilty or cases)
        self.findings.append(found)

    def _is_logged(self, wire: Wire, case: Case | Ask | Bytes) -> bool:
        self._send(wire, case)
        time.sleep(0.2)
        return bool(self.logs.bad_lines())

    def _send(self, wire: Wire, case: Case | Ask | Bytes) -> str | None:
        """What is wrong with what comes of a case."""
        try:
            if isinstance(case, (Ask, Bytes)):
                gateway = self.keyed_gateway if case.keyed else self.open_gateway
                answer = send(case, ("127.0.0.1", gateway.port))
                self.seen["gateway"][_kind(answer)] += 1
                _check(case, answer)
            else:
                wire.send(case)
        except Exception as error:  # an error of Wire, of the network, or Wrong
            return f"{type(error).__name__}: {str(error)[:600]}"
        return None

    @contextmanager
    def good_streams(self) -> Iterator[None]:
        """Keep a good stream running at each of the four interfaces while the block lasts."""
        done = threading.Event()
        asks = (self._by_grpc, self._by_http, self._by_chat, self._by_completion)

        def go_on(ask: Callable[[Question], str], question: Question) -> None:
            name = ask.__name__.removeprefix("_by_")
            while not done.wait(GOOD_PAUSE_S):
                try:
                    said = ask(question)
                    assert said.strip("\n") == question.answer, said
                    self.good[name] += 1
                except Exception as error:  # whatever it is, a good caller has met it
                    self.findings.append(Finding(f"good stream, {name}: {error!r}"[:600], "", []))

        with ThreadPoolExecutor(len(asks)) as pool:
            going = [pool.submit(go_on, *pair) for pair in zip(asks, QUESTIONS, strict=True)]
            try:
                yield
            finally:
                done.set()
            for one in going:
                one.result()

    def _by_grpc(self, question: Question) -> str:
        with (
            Client(self.server.grpc_url, timeout=GOOD_TIMEOUT_S) as client,
            client.stream(question.question, temperature=0, max_tokens=64) as stream,
        ):
            return "".join(chunk.text for chunk in stream)

    def _by_http(self, question: Question) -> str:
        fields = {"text_input": question.question, "stream": True, "temperature": 0}
        address = self.server.http_url.removeprefix("http://")
        connection = http.client.HTTPConnection(address, timeout=GOOD_TIMEOUT_S)
        try:
            body = json.dumps(fields | {"max_tokens": 64})
            connection.request("POST", f"{PATH}/generate_stream", body)
            lines = connection.getresponse().read().decode().split("\n\n")
        finally:
            connection.close()
        return "".join(json.loads(line[6:])["text_output"] for line in lines if line)

    def _by_chat(self, question: Question) -> str:
        messages = [{"role": "user", "content": question.question}]
        with self.open_gateway.sdk() as api:
            stream = api.chat.completions.create(
                model=MODEL, messages=messages, temperature=0, max_tokens=64, stream=True
            )
            return "".join(event.choices[0].delta.content or "" for event in stream)

    def _by_completion(self, question: Question) -> str:
        with self.keyed_gateway.sdk(KEYS[0]) as api:
            stream = api.completions.create(
                model=MODEL, prompt=question.question, temperature=0, max_tokens=64, stream=True
            )
            return "".join(event.choices[0].text for event in stream)


_ANY = st.sampled_from(
    [POSTS, POSTS, INFERS, INFERS, RAW, *[GATEWAY_CASES] * 5]
).flatmap(lambda door: door)  # fmt: skip


def _kind(answer: bytes | None) -> str:
    return answer[9:12].decode(errors="replace") if answer else "no answer"


def _check(case: Ask | Bytes, answer: bytes | None) -> None:
    """An answer of a gateway, or none where the caller did not wait for it. Raises Wrong."""
    waits = isinstance(case, Ask) and case.way in ("whole", "chunked", "slow")
    if not answer:
        if waits and not (answer is None and case.may_be_cut):
            raise Wrong("no answer" if answer is None else "an empty answer")
        return
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        return _check(case, body)
    status = int(head[9:12])
    shown = f"{status} {body[:300]!r}"
    if re.search(rb"\n[^:]*" + MARK.encode() + rb"[^:]*:", head):
        raise Wrong(f"a header of the caller's in {head!r}")
    if status not in ANSWERS or any(word.encode() in body for word in INTERNAL):
        raise Wrong(shown)
    if isinstance(case, Bytes) or not waits:
        return
    error = {}
    if status >= 400 and case.method != "HEAD":
        error = json.loads(body)["error"]
        if not error["message"]:
            raise Wrong(shown)
    if case.named is None:
        if case.statuses and status not in case.statuses:
            raise Wrong(f"not one of {case.statuses}: {shown}")
    elif status not in case.statuses and (status != 400 or case.named not in error["message"]):
        raise Wrong(f"not an error that names {case.named!r}: {shown}")


@dataclass(frozen=True)
class Holding:
    """What the processes of one role hold."""

    processes: int
    mib: float
    threads: int
    files: int


def holdings(fuzz: Fuzz) -> dict[str, Holding]:
    """What is held now, by role."""
    server = psutil.Process(fuzz.server.pid)
    gateways = [fuzz.open_gateway.process.pid, fuzz.keyed_gateway.process.pid]
    of_role: defaultdict[str, list[psutil.Process]] = defaultdict(list)
    for process in (server, *processes_of(fuzz.server), *map(psutil.Process, gateways)):
        command = " ".join(process.cmdline())
        of_role[next((role for role, word in ROLES.items() if word in command), "other")].append(
            process
        )
    return {
        role: Holding(
            len(some),
            round(sum(process.memory_info().rss for process in some) / 2**20, 1),
            sum(process.num_threads() for process in some),
            sum(process.num_fds() for process in some),
        )
        for role, some in of_role.items()
    }


def fill_what_is_bounded(fuzz: Fuzz) -> None:
    """Let each gateway remember as many beginnings of prompts as it ever does."""
    num_prompts = MAX_REMEMBERED // MAX_PIECES + 1
    for gateway, headers in (
        (fuzz.open_gateway, {}),
        (fuzz.keyed_gateway, {"Authorization": f"Bearer {KEYS[0]}"}),
    ):
        for number in range(num_prompts):
            prompt = f"{number} {MARK} " + "x" * MAX_CHARACTERS  # too long for the model
            assert gateway.post("/v1/completions", {"prompt": prompt}, **headers).status == 400


def left_over(before: dict[str, Holding], now: dict[str, Holding]) -> list[str]:
    """What is more than before: processes, threads, descriptors."""
    none = Holding(0, 0.0, 0, 0)
    return [
        f"{role}: {before.get(role, none)} -> {held}"
        for role, held in now.items()
        if (was := before.get(role, none)).processes < held.processes
        or was.threads + MORE_THREADS * (role == "tritonserver") < held.threads
        or was.files < held.files
    ]


def settle(fuzz: Fuzz) -> None:
    """Until nobody is served any more."""

    def is_idle() -> bool:
        shown = metrics(fuzz.server)
        names = ("kv_blocks_used", "num_requests_running", "num_requests_waiting")
        return not any(shown[name] for name in names)

    wait_for(is_idle, SETTLE_S, f"something is left: {metrics(fuzz.server)}")


@contextmanager
def stderr_into(file: Path) -> Iterator[None]:
    """What this process and those that it starts write to stderr goes there."""
    kept = os.dup(2)
    with file.open("ab") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def fuzzed(tmp_path: Path, num_batches: int, *, fresh: bool = False) -> Iterator[Fuzz]:
    """All that is to be hurt; the memory of a ``fresh`` gateway follows environment variables."""
    stderr, keys = tmp_path / "stderr.log", tmp_path / "keys"
    keys.write_text(KEY_FILE)
    with ExitStack() as stack:
        stack.enter_context(stderr_into(stderr))
        server = stack.enter_context(serve_demo(tmp_path, instances=2))
        gateways = [
            stack.enter_context(running_gateway("--triton", server.grpc_url, *flags, fresh=fresh))
            for flags in ((), ("--api-key-file", str(keys)))
        ]
        command = psutil.Process(server.pid).cmdline()
        (log,) = (word.partition("=")[2] for word in command if word.startswith("--log-file="))
        yield Fuzz(server, *gateways, Logs(stderr, Path(log)), num_batches)
        server_log = Path(log).read_text(errors="replace")
    assert "paged_llm" in server_log  # it is the log
    assert not BAD_WORDS.search(stderr.read_text(errors="replace"))


def report(fuzz: Fuzz, *held: dict[str, Holding]) -> str:
    """What was sent and seen, as lines."""
    lines = [f"{fuzz.took_s / 60:.1f} minutes; rounds of each seed: {dict(fuzz.rounds)}"]
    for door, some in fuzz.seen.items():
        lines.append(f"{door}: {some.total()} {dict(sorted(some.items()))}")
    lines.append(f"good streams: {dict(fuzz.good)}")
    for role in held[-1]:
        lines.append(f"{role}: {' -> '.join(str(moment.get(role)) for moment in held)}")
        trail = [str(mib.get(role)) for mib in fuzz.mib[:: max(1, len(fuzz.mib) // 16)]]
        lines.append(f"    MiB on the way: {' '.join(trail)}")
    kinds = Counter(finding.kind for finding in fuzz.findings)
    lines.append(f"findings: {kinds.total()} of {len(kinds)} kinds")
    for kind, number in kinds.most_common():
        same = [finding for finding in fuzz.findings if finding.kind == kind]
        lines.append(f"{number} times:")
        lines += [str(finding) for finding in sorted(same, key=lambda f: len(f.cases))[:SHOWN]]
    return "\n".join(lines)


def run_and_settle(
    fuzz: Fuzz, seeds: Sequence[str], duration_s: float, *, again: bool = False
) -> dict[str, Holding]:
    """Send rounds while good streams run; return what is held when all of them have ended.

    The streams go on for a moment, as a thread may keep its last request until the next one.
    """
    with fuzz.good_streams():
        fuzz.run(seeds, duration_s, again=again)
        time.sleep(CALM_S)
    settle(fuzz)
    time.sleep(CALM_S)
    return holdings(fuzz)


def judge(fuzz: Fuzz, before: dict[str, Holding], *later: dict[str, Holding]) -> None:
    """Print the report; nothing was wrong, and nothing is left."""
    deadline = time.monotonic() + SETTLE_S
    while left_over(before, after := holdings(fuzz)) and time.monotonic() < deadline:
        time.sleep(0.5)
    print("\n" + report(fuzz, before, *later, after))
    assert not fuzz.findings, fuzz.findings[0]
    assert restarts(fuzz.server) == 0
    assert not left_over(before, after)
    assert fuzz.good.total() > 0


def test_a_round_of_generated_requests_at_each_interface(tmp_path: Path) -> None:
    with fuzzed(tmp_path, SHORT_ROUND) as fuzz:
        before = run_and_settle(fuzz, [f"{WARM_UP_SEED}:0"], 0)
        run_and_settle(fuzz, [f"{WARM_UP_SEED}:0"], 0)
        judge(fuzz, before)


@pytest.mark.soak
@pytest.mark.timeout(60 * (MINUTES * (1 + WARM_UP_PART + AGAIN_PART) + 10))
def test_minutes_of_generated_requests_at_each_interface(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is held is compared around requests that were all sent before.

    Caches, heaps and gRPC's pools of threads grow up to what is needed, and rare requests need more
    than others; what the same requests cost again is a leak.
    """
    for name, value in GLIBC.items():
        monkeypatch.setenv(name, value)
    seeds, duration_s = SEEDS.split(","), MINUTES * 60
    with fuzzed(tmp_path, ROUND, fresh=True) as fuzz:
        before = run_and_settle(fuzz, [str(WARM_UP_SEED)], duration_s * WARM_UP_PART)
        fill_what_is_bounded(fuzz)
        between = run_and_settle(fuzz, seeds, duration_s)
        again = run_and_settle(fuzz, seeds, duration_s * AGAIN_PART, again=True)
        print(f"\nafter the warm-up: {before}")
        judge(fuzz, between, again)
    assert min(fuzz.good.values()) > 10
    for role, was in between.items():
        assert again[role].mib < was.mib + MORE_MIB, (role, was, again[role])

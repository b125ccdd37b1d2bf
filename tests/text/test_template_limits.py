"""A template that loops or grows gives its caller an error, and the next one is rendered."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from paged_backend.sandbox import client as sandbox
from paged_backend.sandbox.process import SandboxProcess
from paged_backend.text import template_client
from paged_backend.text.chat import Chat
from paged_backend.text.template_client import MAX_PROCESSES, TemplateClient
from paged_backend.values.errors import InvalidRequest, RequestRefused

CHAT = Chat.from_json([{"role": "user", "content": "hello"}])
TIME = "messages: the chat template took over 0.5 s"
MEMORY = "messages: the chat template needs over 1024 MiB of memory"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Four lines that double a string thirty times.
DOUBLES = (
    "{% set ns = namespace(text='x' * 64) %}{% for _ in range(30) %}"
    "{% set ns.text = ns.text ~ ns.text %}{% endfor %}{{ ns.text }}"
)


@pytest.fixture(scope="module")
def client() -> TemplateClient:
    return TemplateClient()


@pytest.fixture(scope="module")
def strict_client() -> TemplateClient:
    """A client with a quarter of the usual time, for templates that use up all of it."""
    return short_of_time()


def short_of_time() -> TemplateClient:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_client, "TIME_LIMIT_S", 0.5)
        return TemplateClient()


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (LOOP, TIME),
        # One call of a C function that lasts for minutes and holds the interpreter's lock.
        ("{{ 10 ** (10 ** 8) % 7 }}", TIME),
        ("{{ 'x' * 10 ** 10 }}", MEMORY),
        ("{{ '%01000000000000d' % 3 }}", MEMORY),
        ("{{ 'x'.center(10 ** 11) }}", MEMORY),
        ("{% set a = [0] * 10 ** 9 %}", MEMORY),
        (DOUBLES, (TIME, MEMORY)),
        ("{{ 'x' * (2 ** 22 + 1) }}", "messages: the chat template makes over 4194304"),
        (
            "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
            "messages: the chat template says: maximum recursion depth exceeded",
        ),
        ("{{ range(10 ** 9) }}", "messages: the chat template says: Range too big"),
        ("{% for %}", "messages: the chat template says: Expected an expression"),
        ("{{ messages[0]['content'].nothing() }}", "messages: the chat template says: "),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "messages: the chat template says"),
        ("{% include '/etc/passwd' %}", "messages: the chat template says: no loader"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "either",
)
def test_a_template_that_does_too_much_is_named_and_the_next_is_rendered(
    strict_client, source, problem
):
    assert render(strict_client, "{{ messages[0].content }}") == "hello"
    started = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        render(strict_client, source)
    assert str(caught.value).startswith(problem)
    assert len(str(caught.value)) < 300
    assert time.monotonic() - started < 60
    assert render(strict_client, "{{ messages[0].content }}") == "hello"


def test_what_ended_leaves_nothing_behind():
    gc.collect()
    before = descriptors()
    client = short_of_time()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match=TIME):
            render(client, LOOP)
    assert descriptors() == before + 4  # both pipes of the process and of the spare one
    processes = processes_of(client)
    del client
    gc.collect()
    assert descriptors() == before
    assert not any(process.is_running() for process in processes)


def test_processes_that_were_killed_while_they_waited_are_replaced(client):
    assert render(client, "{{ messages[0].content }}") == "hello"
    processes = processes_of(client)
    for process in processes:
        process.kill()
    assert len(psutil.wait_procs(processes, timeout=30)[0]) == len(processes) == 2
    assert render(client, "{{ messages[0].content }}") == "hello"


def test_a_killed_process_that_cannot_be_seen_to_have_ended_costs_no_answer(client, monkeypatch):
    """On a busy machine a signal takes effect late, and both processes may be taken until then."""
    assert render(client, "{{ messages[0].content }}") == "hello"
    processes = processes_of(client)
    assert len(processes) == 2

    def was_waited_for(process: SandboxProcess) -> bool:
        return process._process.returncode is not None

    monkeypatch.setattr(SandboxProcess, "is_lost", was_waited_for)
    for process in processes:
        process.kill()
    assert render(client, "{{ messages[0].content }}") == "hello"


def test_processes_that_were_stopped_while_they_waited_are_replaced(client):
    assert render(client, "{{ messages[0].content }}") == "hello"
    processes = processes_of(client)
    for process in processes:
        stop(process)
    assert render(client, "{{ messages[0].content }}") == "hello"
    assert not any(process.is_running() for process in processes)


@contextlib.contextmanager
def rendering(client: TemplateClient, source: str) -> Iterator[tuple[psutil.Process, list[str]]]:
    """The process that renders a template in another thread, and what comes of it."""
    outcome: list[str] = []

    def ask() -> None:
        try:
            outcome.append(render(client, source))
        except (InvalidRequest, RequestRefused) as error:
            outcome.append(str(error))

    assert render(client, "{{ messages[0].content }}") == "hello"
    before = {process: process.cpu_times().user for process in processes_of(client)}
    thread = threading.Thread(target=ask)
    thread.start()

    def busy() -> list[psutil.Process]:
        return [p for p, used in before.items() if p.cpu_times().user > used + 0.02]

    wait_until(busy)
    yield busy()[0], outcome
    thread.join()


# Long enough to be met while it runs; on a slow machine also less than a template may take.
SLOW = "{% for a in range(10000) %}{% for b in range(1500) %}{% endfor %}{% endfor %}done"


@pytest.mark.parametrize(
    "signal_",
    [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough), signal.SIGSTOP],
)
def test_a_request_whose_process_was_ended_from_outside_is_asked_again(client, signal_):
    with rendering(client, SLOW) as (process, outcome):
        assert not outcome
        process.send_signal(signal_)
    assert outcome == ["done"]
    assert not process.is_running()


@pytest.mark.timeout(120)
def test_a_request_whose_process_is_always_ended_is_refused_for_now(client):
    """It may be what the kernel ends them for, when the machine has no more memory."""
    over = threading.Event()
    command = client._sandbox._command

    def kill_all() -> None:
        while not over.wait(0.05):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if child.cmdline() == command and child.cpu_times().user > 1.5:
                        child.kill()

    killer = threading.Thread(target=kill_all)
    killer.start()
    try:
        with pytest.raises(RequestRefused, match="^process_lost: .* by signal 9; retry after 1 s$"):
            render(client, LOOP)
    finally:
        over.set()
        killer.join()
    assert render(client, "{{ messages[0].content }}") == "hello"


@pytest.mark.timeout(60)
def test_calls_wait_no_longer_than_their_turn(client, monkeypatch):
    """As many slow ones as there are processes, and one call more."""
    monkeypatch.setattr(sandbox, "TURN_LIMIT_S", 0.05)
    outcomes: list[str] = []

    def ask() -> None:
        try:
            outcomes.append(render(client, SLOW))
        except RequestRefused as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=ask) for _ in range(MAX_PROCESSES + 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == [
        *["done"] * MAX_PROCESSES,
        "queue_full: other chat templates took over 0.05 s; retry after 10 s",
    ]


def test_a_call_beside_a_loop_does_not_wait_for_it(client):
    with rendering(client, LOOP) as (_, outcome):
        assert render(client, "{{ messages[0].content }}") == "hello"
        assert not outcome
    assert outcome == ["messages: the chat template took over 2 s"]


@pytest.mark.parametrize(
    "name",
    [
        *("jinja2", "paged_backend"),
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("transformers", "json")),
    ],
)
def test_nothing_is_imported_from_the_working_directory(tmp_path, monkeypatch, name):
    (tmp_path / f"{name}.py").write_text("import os; os._exit(33)")
    monkeypatch.chdir(tmp_path)
    assert render(TemplateClient(), "{{ messages[0].content }}") == "hello"


def test_many_threads_get_their_own_answers(client):
    answers: dict[int, str] = {}

    def ask(number: int) -> None:
        answers[number] = render(client, f"{number} {{{{ messages[0].content }}}}")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: f"{number} hello" for number in range(16)}


@pytest.mark.parametrize("text", ["\ud800", "\0\r\n\u2028", "日本語👩‍👩‍👧", "x" * 2**20])
def test_text_passes_as_it_is(client, text):
    arguments = {"messages": [{"role": "user", "content": text}]}
    assert client.render({**arguments, "chat_template": "{{ messages[0].content }}"}) == text


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path):
    """Even while it loops, and even if that one was killed."""
    code = f"""
import os, threading, time
import psutil
from paged_backend.text.template_client import TemplateClient

def arguments(source):
    return {{"messages": [{{"role": "user", "content": "x"}}], "chat_template": source}}

client = TemplateClient()
client.render(arguments("x"))
process = psutil.Process(client._sandbox._idle[0].pid)
used = process.cpu_times().user
threading.Thread(target=client.render, args=(arguments({LOOP!r}),), daemon=True).start()
while process.cpu_times().user < used + 0.5:
    time.sleep(0.01)
print(process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(run.stdout)
    deadline = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_caller_cannot_turn_the_renderer_s_own_arguments():
    with pytest.raises(InvalidRequest, match="^chat_template_kwargs: must not hold add_generation"):
        Chat.from_json(
            {"messages": CHAT.messages, "chat_template_kwargs": {"add_generation_prompt": 3}}
        )


def render(client: TemplateClient, source: str) -> str:
    return client.render({"messages": CHAT.messages, "chat_template": source})


def processes_of(client: TemplateClient) -> list[psutil.Process]:
    """The processes that no call uses at present."""
    return [psutil.Process(process.pid) for process in client._sandbox._idle]


def stop(process: psutil.Process) -> None:
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))

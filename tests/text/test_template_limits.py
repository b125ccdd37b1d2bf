"""A template that loops or grows gives its caller an error, and the next one is rendered."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from paged_backend.errors import InvalidRequest, RequestRefused
from paged_backend.sandbox import client as sandbox
from paged_backend.text.chat import Chat
from paged_backend.text.template_client import TemplateClient

CHAT = Chat.from_json([{"role": "user", "content": "hello"}])
# Two seconds of a processor, unless other programs take it for so long that ten have gone by.
TIME = (
    "messages: the chat template took over 2 s",
    "messages: the process of chat templates gave no answer in 10 s",
)
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
        (DOUBLES, (*TIME, MEMORY)),
        ("{{ 'x' * (2 ** 26 + 1) }}", "messages: the chat template makes over 67108864"),
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
def test_a_template_that_does_too_much_is_named_and_the_next_is_rendered(client, source, problem):
    assert render(client, "{{ messages[0].content }}") == "hello"
    started = time.monotonic()
    with pytest.raises(InvalidRequest) as caught:
        render(client, source)
    assert str(caught.value).startswith(problem)
    assert len(str(caught.value)) < 300
    assert time.monotonic() - started < 60
    assert render(client, "{{ messages[0].content }}") == "hello"


def test_what_ended_leaves_nothing_behind():
    gc.collect()
    before = descriptors()
    client = TemplateClient()
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="|".join(TIME)):
            render(client, LOOP)
    assert descriptors() == before + 2  # both pipes of the one process that is there
    process = process_of(client)
    del client
    gc.collect()
    assert descriptors() == before
    assert not process.is_running()


def test_a_process_that_was_killed_is_replaced(client):
    client.start()
    process_of(client).kill()
    assert psutil.wait_procs([process_of(client)], timeout=30)
    assert render(client, "{{ messages[0].content }}") == "hello"


@pytest.fixture
def stopped(client: TemplateClient) -> Iterator[psutil.Process]:
    """The process of a client, ready and stopped."""
    assert render(client, "{{ messages[0].content }}") == "hello"
    process = process_of(client)
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED)
    yield process
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()


@pytest.mark.parametrize("length", [1, 2**20], ids=["short", "longer than a pipe holds"])
@pytest.mark.timeout(60)
def test_a_process_that_is_stopped_fails_one_call_and_is_replaced(
    client, stopped, length, monkeypatch
):
    monkeypatch.setattr(sandbox, "ANSWER_LIMIT_S", 1)
    with pytest.raises(InvalidRequest, match="^messages: .* gave no answer in 1 s$"):
        client.render(
            {"messages": [{"role": "user", "content": "x" * length}], "chat_template": "x"}
        )
    assert process_of(client) != stopped
    assert not stopped.is_running()
    assert render(client, "{{ messages[0].content }}") == "hello"


@pytest.mark.timeout(60)
def test_calls_behind_one_that_gets_no_answer_wait_no_longer_than_their_turn(
    client, stopped, monkeypatch
):
    """With limits of which that for turns is the shorter one, as many calls in a row make it."""
    monkeypatch.setattr(sandbox, "ANSWER_LIMIT_S", 2.0)
    monkeypatch.setattr(sandbox, "TURN_LIMIT_S", 0.5)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            render(client, "x")
        except (InvalidRequest, RequestRefused) as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(type(error).__name__ for error in errors) == [
        *("InvalidRequest", "RequestRefused", "RequestRefused", "RequestRefused")
    ]
    assert {str(error) for error in errors if isinstance(error, RequestRefused)} == {
        "queue_full: other chat templates took over 0.5 s; retry after 10 s"
    }


def test_a_long_start_is_no_failure_of_the_first_call(monkeypatch):
    """The process is stopped while it starts, for longer than a call may take."""
    monkeypatch.setattr(sandbox, "ANSWER_LIMIT_S", 2.0)
    client = TemplateClient()
    client.start()
    process = process_of(client)
    process.suspend()
    timer = threading.Timer(sandbox.ANSWER_LIMIT_S + 0.5, process.resume)
    timer.start()
    assert render(client, "{{ messages[0].content }}") == "hello"
    timer.join()
    assert process_of(client) == process


@pytest.mark.parametrize("name", ["jinja2", "transformers", "json", "paged_backend"])
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
process = psutil.Process(client._sandbox._process.pid)
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


def process_of(client: TemplateClient) -> psutil.Process:
    assert client._sandbox._process is not None
    return psutil.Process(client._sandbox._process.pid)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))

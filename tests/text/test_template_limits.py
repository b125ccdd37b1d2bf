"""A template that loops or grows gives its caller an error, and the next one is rendered."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from paged_backend.errors import InvalidRequest
from paged_backend.text.chat import Chat
from paged_backend.text.template_client import TemplateClient

CHAT = Chat.from_json([{"role": "user", "content": "hello"}])
TIME = "messages: the chat template took over 2 s"
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
        (DOUBLES, (TIME, MEMORY)),
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
        with pytest.raises(InvalidRequest, match="took over 2 s"):
            render(client, LOOP)
    assert descriptors() == before + 2  # both pipes of the one process that is there
    process = client._process
    del client
    gc.collect()
    assert descriptors() == before
    assert process.returncode is not None


def test_a_process_that_was_killed_is_replaced(client):
    client.start()
    client._process.kill()
    client._process.wait()
    assert render(client, "{{ messages[0].content }}") == "hello"


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
    arguments = {"conversations": [[{"role": "user", "content": text}]]}
    assert client.render({**arguments, "chat_template": "{{ messages[0].content }}"}) == text


def test_the_process_ends_with_the_one_that_started_it(tmp_path: Path):
    """Even while it loops, and even if that one was killed."""
    code = f"""
import os, threading, time
from paged_backend.text.chat import Chat, ChatTemplate
template = ChatTemplate({LOOP!r}, {{}})
template.prepare()
chat = Chat.from_json([{{"role": "user", "content": "x"}}])
threading.Thread(target=template.render, args=(chat,), daemon=True).start()
time.sleep(3)
print(template._client._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    run = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(run.stdout)
    deadline = time.monotonic() + 30
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_caller_cannot_turn_the_renderer_s_own_arguments():
    with pytest.raises(InvalidRequest, match="^chat_template_kwargs: must not hold add_generation"):
        Chat.from_json(
            {"messages": CHAT.messages, "chat_template_kwargs": {"add_generation_prompt": 3}}
        )


def render(client: TemplateClient, source: str) -> str:
    return client.render({"conversations": [CHAT.messages], "chat_template": source})


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))

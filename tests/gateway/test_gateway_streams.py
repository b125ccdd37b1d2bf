"""Many at once, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import openai
import pytest
from gateways import MODEL

from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server
QUESTIONS = load_questions()
ENDLESS = {
    "model": MODEL,
    "prompt": "What does",
    "max_tokens": 1900,
    "extra_body": {"ignore_eos": True},
}


def test_leaving_a_stream_cancels_it(server, api):
    with server.aborting(1), api.completions.create(**ENDLESS, stream=True) as stream:
        next(stream)


def test_leaving_a_stream_of_several_prompts_cancels_all(server, api):
    options = ENDLESS | {"prompt": ["What does", "Who is", "How"], "n": 2}
    with server.aborting(6), api.completions.create(**options, stream=True) as stream:
        next(stream)
        server.wait_for("num_requests_running", 6)


@pytest.mark.parametrize("prompt", ["What does", ["What does", "Who is"]])
def test_leaving_without_a_stream_cancels_too(server, gateway, prompt):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1900, "ignore_eos": True}
    num_answers = 1 if isinstance(prompt, str) else 2
    with server.aborting(num_answers), gateway.connection() as connection:
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        server.wait_for("num_requests_running", num_answers)


def test_a_client_that_gives_up_cancels(server, gateway):
    with (
        server.aborting(1),
        gateway.sdk(timeout=0.3) as impatient,
        pytest.raises(openai.APITimeoutError),
    ):
        impatient.completions.create(**ENDLESS)


def test_a_client_that_waits_in_the_queue_may_leave(server, gateway, client):
    streams = [client.stream("What does", max_tokens=1900, ignore_eos=True) for _ in range(64)]
    for stream in streams:
        next(stream)
    with pytest.raises(openai.APITimeoutError), gateway.sdk(timeout=0.3) as impatient:
        impatient.completions.create(**ENDLESS, stream=True)
    server.wait_for("num_requests_waiting", 0)
    assert server.metrics()["num_requests_running"] == 64
    for stream in streams:
        stream.cancel()


def test_of_64_streams_32_are_dropped_and_the_others_complete(server, gateway):
    questions = (QUESTIONS * 2)[:32]

    async def follow(api, question):
        stream = await api.completions.create(
            model=MODEL, prompt=question.question, temperature=0, max_tokens=64, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def drop(api):
        async with await api.completions.create(**ENDLESS, stream=True) as stream:
            for _ in range(4):
                await anext(stream)

    async def scenario():
        async with openai.AsyncOpenAI(
            base_url=f"http://{gateway.address}/v1", api_key="none", max_retries=0
        ) as api:
            kept = [follow(api, question) for question in questions]
            *texts, _ = await asyncio.gather(*kept, asyncio.gather(*(drop(api) for _ in range(32))))
            return texts

    assert asyncio.run(scenario()) == ["\n" + question.answer for question in questions]
    server.wait_for("kv_blocks_used", 0)
    opened = f'open_requests{{server="{server.running.grpc_url}"}}'
    deadline = time.monotonic() + 30
    while gateway.metrics()[opened]:
        assert time.monotonic() < deadline, "requests of clients that have left are open"
        time.sleep(0.05)


def test_a_slow_reader_gets_everything(gateway, client):
    expected = client.generate("What does", max_tokens=500, ignore_eos=True, temperature=0).text
    with gateway.sdk() as api:
        options = ENDLESS | {"max_tokens": 500, "temperature": 0}
        text = ""
        with api.completions.create(**options, stream=True) as stream:
            for number, chunk in enumerate(stream):
                time.sleep(0.05 if number < 10 else 0)
                text += chunk.choices[0].text
    assert text == expected


def test_the_gateway_counts_what_it_does(server, gateway, api):
    route = 'route="/v1/completions"'
    before = gateway.metrics()
    for _ in range(2):
        api.completions.create(model=MODEL, prompt="Nobody asked this. " * 20, max_tokens=1)
    gateway.post("/v1/completions", {"model": MODEL})
    after = gateway.metrics()

    def added(name):
        return after[name] - before.get(name, 0)

    address = server.running.grpc_url
    assert added(f'requests_total{{{route},status="200"}}') == 2
    assert added(f'requests_total{{{route},status="400"}}') == 1
    assert added(f'routed_total{{chosen_by="load",server="{address}"}}') == 1
    assert added(f'routed_total{{chosen_by="prefix",server="{address}"}}') == 1
    assert added(f"time_to_first_byte_seconds_count{{{route}}}") == 3
    assert after[f'server_up{{server="{address}"}}'] == 1


def test_answers_do_not_mix(gateway):
    """Threads with clients of their own, chats and completions, streams and not."""
    wrong = []

    def ask(question):
        with gateway.sdk() as api:
            for stream in (False, True):
                answer = api.completions.create(
                    model=MODEL,
                    prompt=question.question,
                    temperature=0,
                    max_tokens=64,
                    stream=stream,
                )
                chunks = answer if stream else [answer]
                text = "".join(chunk.choices[0].text for chunk in chunks)
                if text != "\n" + question.answer:
                    wrong.append((question.name, stream, text))

    threads = [threading.Thread(target=ask, args=(question,)) for question in QUESTIONS[:12]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

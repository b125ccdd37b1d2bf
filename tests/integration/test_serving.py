"""Answers over real sockets: gRPC streams, generate, generate_stream, many at once, cancelled."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from demo_server import MAX_NUM_SEQS, read_until
from paged_client import AsyncClient, RequestCancelled
from tritonclient.grpc import InferenceServerClient, InferInput

from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server
QUESTIONS = load_questions()
GREEDY = {"temperature": 0, "max_tokens": 64}


def ask(question):
    return "\n" + question.answer  # what follows the bare question as a text prompt


def test_a_grpc_stream_brings_the_answer_piece_by_piece(client):
    with client.stream(QUESTIONS[0].question, **GREEDY) as stream:
        chunks = list(stream)
    assert "".join(chunk.text for chunk in chunks) == ask(QUESTIONS[0])
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "stop"
    assert len(chunks) > 1
    assert {chunk.num_input_tokens for chunk in chunks} == {chunks[0].num_input_tokens}


def test_generate_answers_once_with_the_prompt_in_front(server):
    question = QUESTIONS[1]
    status, body = server.post("generate", {"text_input": question.question, **GREEDY})
    assert status == 200
    assert json.loads(body)["text_output"] == question.question + ask(question)


def test_generate_without_the_prompt_and_with_additional_outputs(server):
    fields = {
        "text_input": QUESTIONS[1].question,
        "exclude_input_in_output": True,
        "return_finish_reason": True,
        "return_num_input_tokens": True,
        "return_num_output_tokens": True,
        **GREEDY,
    }
    status, body = server.post("generate", fields)
    answer = json.loads(body)
    assert (status, answer["text_output"]) == (200, ask(QUESTIONS[1]))
    assert answer["finish_reason"] == "stop"
    assert answer["num_input_tokens"] > 3
    assert answer["num_output_tokens"] > 3


def test_generate_stream_sends_only_what_is_new(server):
    question = QUESTIONS[3]  # whose answer is too short to be sent in one piece
    status, body = server.post(
        "generate_stream", {"text_input": question.question, "stream": True, **GREEDY}
    )
    events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
    assert status == 200
    assert "".join(event["text_output"] for event in events) == ask(question)
    assert len(events) > 1
    assert "finish_reason" not in events[0]


def test_parameters_may_be_strings_and_come_as_a_tensor(server):
    fields = {
        "text_input": QUESTIONS[0].question,
        "sampling_parameters": json.dumps({"temperature": "0.0", "max_tokens": "3"}),
        "return_num_output_tokens": True,
    }
    status, body = server.post("generate", fields)
    assert (status, json.loads(body)["num_output_tokens"]) == (200, 3)


def test_max_tokens_is_16_by_default(server):
    fields = {"text_input": "Tell me", "ignore_eos": True, "return_num_output_tokens": True}
    _, body = server.post("generate", fields)
    assert json.loads(body)["num_output_tokens"] == 16


def test_token_ids_in_and_out(client):
    text = client.generate(QUESTIONS[3].question, **GREEDY)
    whole = client.generate(QUESTIONS[3].question, **GREEDY, min_tokens=1)
    assert text.token_ids == whole.token_ids
    echoed = client.generate([*range(5, 25)], temperature=0, max_tokens=4, ignore_eos=True)
    assert echoed.num_input_tokens == 20
    assert len(echoed.token_ids) == 4


def test_stop_strings_end_the_text_and_the_request(client):
    answer = QUESTIONS[4].answer
    stop = answer.split()[2]
    completion = client.generate(QUESTIONS[4].question, **GREEDY, stop=[stop])
    assert completion.text == "\n" + answer[: answer.index(stop)]
    assert completion.finish_reason == "stop"


def test_n_answers_to_one_prompt_share_it(client):
    completion = client.generate("What does", n=3, seed=5, max_tokens=12, ignore_eos=True)
    assert [answer.num_output_tokens for answer in completion.answers] == [12, 12, 12]
    assert len({answer.token_ids for answer in completion.answers}) > 1
    again = client.generate("What does", n=3, seed=5, max_tokens=12, ignore_eos=True)
    assert again.answers == completion.answers


def test_a_seeded_answer_does_not_depend_on_its_company(client):
    def sample(seed):
        return client.generate("What does", seed=seed, max_tokens=24, ignore_eos=True).token_ids

    alone = [sample(seed) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(sample, range(8)))
    assert together == alone


def test_a_repeated_prefix_is_served_from_the_cache(client, server):
    prompt = "A text that nobody has sent before, long enough for a few blocks. " * 3
    client.generate(prompt, max_tokens=1)
    found = client.generate(prompt + "And more.", max_tokens=1).num_cached_tokens
    assert found >= 32
    assert client.generate("Or " + prompt, max_tokens=1).num_cached_tokens == 0


def test_64_streams_at_once_are_all_right(client):
    questions = (QUESTIONS * 2)[:64]
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda q: client.generate(q.question, **GREEDY).text, questions))
    assert answers == [ask(question) for question in questions]


def start_endless(client):
    """A stream that would run to the model's longest context, after its first chunk."""
    stream = client.stream("What does", temperature=0, max_tokens=1500, ignore_eos=True)
    return stream, next(stream)


def test_cancelling_a_stream_gives_its_blocks_back(client, server):
    stream, _ = start_endless(client)
    with server.aborting(1):
        stream.cancel()
    with pytest.raises(RequestCancelled):
        list(stream)


def test_a_cancelled_stream_is_read_to_its_end(client, server):
    """gRPC's own cancellation can make threads of tritonserver wait for each other forever."""
    streams = [start_endless(client)[0] for _ in range(8)]
    with server.aborting(8):
        for stream in streams:
            stream.cancel()
    for stream in streams:
        assert stream._call._call.code() == grpc.StatusCode.OK


def test_a_cancelled_stream_of_asyncio_is_read_to_its_end(server):
    async def scenario():
        async with AsyncClient(server.running.grpc_url) as client:
            streams = [
                client.stream("What does", max_tokens=1500, ignore_eos=True) for _ in range(8)
            ]
            for stream in streams:
                await anext(stream)
            waiting = [asyncio.create_task(collect(stream)) for stream in streams[4:]]
            await asyncio.sleep(0)
            for stream, task in zip(streams[:4], waiting, strict=True):
                stream.cancel()
                task.cancel()
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert {type(result) for result in results} == {asyncio.CancelledError}
            for stream in streams:
                assert await stream._call._call.code() == grpc.StatusCode.OK

    with server.aborting(8):
        asyncio.run(scenario())


async def collect(stream):
    return [chunk async for chunk in stream]


def test_stop_stream_of_tritonclient_cancels(server):
    arrived = threading.Event()
    client = InferenceServerClient(server.running.grpc_url)
    client.start_stream(lambda result, error: arrived.set())
    inputs = [InferInput("text_input", [1], "BYTES"), InferInput("stream", [1], "BOOL")]
    inputs[0].set_data_from_numpy(np.array([b"What does"], dtype=object))
    inputs[1].set_data_from_numpy(np.array([True]))
    parameters = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    client.async_stream_infer("paged_llm", inputs, parameters=parameters)
    assert arrived.wait(60)
    with server.aborting(1):
        client.stop_stream(cancel_requests=True)
    client.close()


def test_a_cancelled_request_that_waits_is_dropped_too(client, server):
    with server.full():
        waiting = client.stream("What does", max_tokens=4)
        server.wait_for("num_requests_waiting", 1)
        waiting.cancel()
        server.wait_for("num_requests_waiting", 0)
        assert server.metrics()["num_requests_running"] == MAX_NUM_SEQS


def test_a_request_that_waits_can_be_cancelled_by_its_name(server):
    fields = {"text_input": "What does", "call_id": "waits", "return_finish_reason": True}
    with server.full(), ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, "generate", fields | {"exclude_input_in_output": True})
        server.wait_for("num_requests_waiting", 1)
        assert server.post("generate", {"task": "cancel", "call_id": "waits"})[0] == 200
        status, body = answer.result(60)
    assert status == 200, body
    assert (json.loads(body)["text_output"], json.loads(body)["finish_reason"]) == ("", "abort")


def test_a_dropped_http_connection_gives_its_blocks_back(server):
    host, port = server.running.http_url.removeprefix("http://").split(":")
    fields = {"text_input": "What does", "stream": True, "max_tokens": 1500, "ignore_eos": True}
    body = json.dumps(fields).encode()
    head = "POST /v2/models/paged_llm/generate_stream HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with server.aborting(1), socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        read_until(connection, b"data: ")

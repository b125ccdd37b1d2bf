"""Pipelines on a real server: preprocess, the model, postprocess, and what is built of them."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import tokenizers
from demo_server import MAX_NUM_SEQS, MODEL, Server, read_until
from integration.generating import generate, generate_stream, post
from markov import ANYTHING, TEXT, ends_within_character, make_markov_checkpoint
from paged_client import Client, InvalidRequest, RequestCancelled, Unavailable
from pipelines import OWN, TENSORRTLLM, write_part_of_pipeline

from paged_backend.launch.pipeline import MAX_INFLIGHT_REQUESTS, knows_the_bound
from paged_backend.launch.repository import model_names, write_pipeline
from paged_backend.launch.server_process import RunningServer, start_server
from paged_backend.serving.requests.front_end import MAX_BEHIND
from paged_backend.tools.demo import load_questions
from paged_backend.values.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent.parent / "text"))
from sample_tokenizers import KINDS  # noqa: E402

PAGED_BACKEND = Path(sys.executable).parent / "paged-backend"
BUNDLED = Path(__file__).parents[2] / "model_repository"
QUESTIONS = load_questions()
GREEDY = {"temperature": 0, "max_tokens": 64}
OURS = ["llm", "llm_bls"]
LONG_TEXT = "The quick brown fox jumps over the lazy dog. " * 900


@pytest.fixture(scope="module")
def server(pipeline: Server) -> Server:
    return pipeline


@pytest.fixture(params=OURS)
def llm(request: pytest.FixtureRequest, server: Server) -> Iterator[Client]:
    """A client of the ensemble, and one of the program that does the same."""
    with Client(server.running.grpc_url, request.param, timeout=60) as client:
        yield client


@pytest.mark.server
def test_only_models_that_take_messages_keep_a_process_for_them(server: Server) -> None:
    def owners() -> set[int]:
        children = psutil.Process(server.running.pid).children(recursive=True)
        return {
            child.ppid() for child in children if "template_process" in " ".join(child.cmdline())
        }

    # Both instances of the model, and two first steps; each may have a spare process.
    wanted = 4
    deadline = time.monotonic() + 60
    while len(owners()) < wanted:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.0)
    assert len(owners()) == wanted


# --- the ensemble with our names, and the program that calls the same steps -------------------


@pytest.mark.server
def test_a_stream_through_the_steps_is_the_models_own(llm: Client, client: Client) -> None:
    question = QUESTIONS[0].question
    with llm.stream(question, **GREEDY) as stream:
        chunks = list(stream)
    direct = client.generate(question, **GREEDY)
    assert "".join(chunk.text for chunk in chunks) == direct.text
    assert tuple(id_ for chunk in chunks for id_ in chunk.token_ids) == direct.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert len(chunks) > 1
    assert {chunk.num_input_tokens for chunk in chunks} == {direct.num_input_tokens}


@pytest.mark.server
def test_several_answers_with_their_probabilities(llm: Client, client: Client) -> None:
    wishes = {"n": 3, "seed": 4, "max_tokens": 20, "logprobs": 2, "temperature": 1.5}
    through, direct = llm.generate("What does", **wishes), client.generate("What does", **wishes)
    assert through.answers == direct.answers
    assert len({answer.num_output_tokens for answer in direct.answers}) > 1


@pytest.mark.server
def test_64_streams_at_once_keep_their_order(llm: Client) -> None:
    questions = (QUESTIONS * 2)[:64]
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda q: llm.generate(q.question, **GREEDY).text, questions))
    assert answers == ["\n" + question.answer for question in questions]


@pytest.mark.server
def test_stop_strings_that_lie_across_responses(llm: Client) -> None:
    answer = QUESTIONS[4].answer
    first, second, third = answer.split()[:3]
    cases = [[f"{second} {third}"], [f"{first} {second} {third}?", third[:3]], ["never there"]]
    for stop in cases:
        found = [answer.index(text) for text in stop if text in answer]
        with llm.stream(QUESTIONS[4].question, **GREEDY, stop=stop) as stream:
            chunks = list(stream)
        expected = answer[: min(found)] if found else answer
        assert "".join(chunk.text for chunk in chunks) == "\n" + expected
        assert chunks[-1].finish_reason == "stop"


@pytest.mark.server
def test_a_stop_string_can_be_a_special_token(llm: Client) -> None:
    """The step that makes the text is another one than the one that ends the sequence."""
    answer, ends = QUESTIONS[4].answer, {"max_tokens": 80, "temperature": 0, "ignore_eos": True}
    for stop, expected in (("<|end|>", answer), (f"{answer[-4:]}<|end|>", answer[:-4])):
        options: dict[str, Any] = {**ends, "stop": [stop], "stop_special_tokens": True}
        with llm.stream(QUESTIONS[4].question, **options) as stream:
            assert "".join(chunk.text for chunk in stream) == "\n" + expected


PART = {
    "output_ids": ("INT32", [40, 41]),
    "num_output_tokens": ("UINT32", [2]),
    "finish_reason": ("BYTES", ["None"]),
    "sequence_length": ("INT32", [2]),
    "context_ids": ("INT32", []),
    "num_context_ids": ("UINT32", [0]),
    "num_held_ids": ("UINT32", [0]),
    "pass_through": (
        "BYTES",
        ['{"call_id": "", "prompt": "", "wanted": [], "params": {"stop": ["x"]}}'],
    ),
}


@pytest.mark.server
@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("num_held_ids", [1], "num_held_ids: must be at most 0"),
        ("num_context_ids", [2049], "num_context_ids: must be at most 2048"),
        ("num_held_ids", [0, 0], "num_held_ids: has 2 elements for 1 completions"),
        ("sequence_length", [1], "sequence_length: must be at least 2"),
        ("output_ids", [40, -1], "output_ids: must be at least 0"),
        ("output_ids", [40], "output_ids: has 1 elements, num_output_tokens says otherwise"),
        ("finish_reason", ["None"] * 65, "finish_reason: at most 64 elements, got 65"),
        ("finish_reason", ["bored"], "finish_reason: must be one of"),
        ("pass_through", ["{}"], "pass_through: must be what preprocess made"),
        (
            "pass_through",
            ['{"call_id": "", "prompt": "", "wanted": ["tool_calls"], "params": {}}'],
            "parsed_text: is missing",
        ),
    ],
)
def test_tensors_of_the_last_step_that_contradict_each_other_are_named(
    server: Server, name: str, values: list[Any], message: str
) -> None:
    kind, _ = PART[name]
    inputs = [
        {"name": tensor, "datatype": datatype, "shape": [len(data)], "data": data}
        for tensor, (datatype, data) in (PART | {name: (kind, values)}).items()
    ]
    status, body = post(server, "postprocess", "infer", {"inputs": inputs})
    assert (status, message in body) == (400, True), body


def last_step(server: Server, **values: list[Any]) -> tuple[int, str]:
    """Ask the last step alone, with other values of some tensors."""
    parts = PART | ({"parsed_text": ("BYTES", [])} if "parsed_text" in values else {})
    inputs = [
        {"name": name, "datatype": datatype, "shape": [len(data)], "data": data}
        for name, (datatype, data) in parts.items()
        for data in [values.get(name, data)]
    ]
    return post(server, "postprocess", "infer", {"inputs": inputs})


@pytest.mark.server
def test_long_answers_of_one_client_do_not_hold_up_the_texts_of_others(server: Server) -> None:
    """The most that one request may ask for: 64 completions, each with 2,048 tokens before it."""
    long = {
        "output_ids": [40, 41] * 64,
        "num_output_tokens": [2] * 64,
        "finish_reason": ["None"] * 64,
        "sequence_length": [4000] * 64,
        "context_ids": [40, 41] * 1024 * 64,
        "num_context_ids": [2048] * 64,
        "num_held_ids": [0] * 64,
        # Texts of the same call would have to wait.
        "pass_through": [PART["pass_through"][1][0].replace('""', '"long"', 1)],
    }
    for _ in range(5):  # the machine may be busy
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(last_step, server, **long) for _ in range(4)]
            number = 0
            while not all(answer.done() for answer in answers):
                assert last_step(server)[0] == 200
                number += 1
        assert [answer.result()[0] for answer in answers] == [200] * 4
        if number >= 20:  # one after the other, they would be 5 at most
            return
    pytest.fail(f"only {number} texts beside long answers")


@pytest.mark.server
def test_the_last_step_takes_no_more_tokens_than_a_model_can_generate(server: Server) -> None:
    number = 2**20
    status, body = last_step(
        server, output_ids=[40] * number, num_output_tokens=[number], sequence_length=[number]
    )
    assert status == 400 and "num_output_tokens: must be at most " in body


@pytest.mark.server
def test_the_last_step_repeats_a_prompt_no_more_often_than_there_are_completions(
    server: Server,
) -> None:
    passed = {"call_id": "c", "prompt": "x" * 2_000_000, "wanted": ["reasoning"], "params": {}}
    echo = [json.dumps(passed)]
    status, body = last_step(server, pass_through=echo, parsed_text=["a"] * 300)
    assert status == 400 and "parsed_text: has 300 elements for 1 completions" in body
    number = 64
    status, body = last_step(
        server, pass_through=echo, parsed_text=["a"] * number, finish_reason=["None"] * number
    )
    problem = "pass_through: has a prompt of 2000000 characters for 64 completions, at most"
    assert status == 400 and problem in body
    status, body = last_step(server, pass_through=echo, parsed_text=["a"])
    assert status == 200 and "xxxa" in body


@pytest.mark.server
def test_steps_refuse_requests_when_too_many_wait(server: Server) -> None:
    """Two of each have room; all that have it are answered."""
    problems = {
        "slow.llm": "queue_full: 2 requests wait to be prepared; retry after 1 s",
        "slow.llm_bls": "queue_full: 1 requests wait for a thread; retry after 1 s",
    }
    with ThreadPoolExecutor(6) as pool:
        for model, problem in problems.items():
            with Client(server.running.grpc_url, model, timeout=60) as client:
                messages = [{"role": "user", "content": "x"}]
                run = partial(client.generate, messages, max_tokens=1)
                calls = [pool.submit(run) for _ in range(6)]
                errors = [call.exception() for call in calls]
            refused = [error for error in errors if error is not None]
            assert 2 <= len(errors) - len(refused) <= 4, errors
            assert {str(error) for error in refused} == {problem}
            assert all(isinstance(error, Unavailable) for error in refused)


@pytest.mark.server
@pytest.mark.parametrize("model", OURS)
def test_generate_with_plain_fields(server: Server, model: str) -> None:
    question = QUESTIONS[3]  # whose answer is too short to be sent in one piece
    text = "\n" + question.answer
    fields = {"text_input": question.question, "stop": ["no such", "text"], **GREEDY}
    assert generate(server, model, **fields)["text_output"] == question.question + text
    answer = generate(
        server, model, **fields, exclude_input_in_output=True, return_finish_reason=True
    )
    assert (answer["text_output"], answer["finish_reason"]) == (text, "stop")
    assert "output_ids" not in answer and "num_input_tokens" not in answer
    events = generate_stream(server, model, **fields)
    assert "".join(event["text_output"] for event in events) == text
    assert len(events) > 1


@pytest.mark.server
@pytest.mark.parametrize("model", OURS)
def test_messages_are_rendered_with_the_models_template(server: Server, model: str) -> None:
    question = QUESTIONS[3]
    chat = json.dumps([{"role": "user", "content": question.question}])
    answer = generate(server, model, messages=chat, exclude_input_in_output=False, **GREEDY)
    prompt = f"<|user|>{question.question}<|end|><|assistant|>"
    assert answer["text_output"] == prompt + question.answer
    alone = generate(server, model, messages=chat, **GREEDY)
    assert alone["text_output"] == question.answer


@pytest.mark.server
@pytest.mark.parametrize("model", OURS)
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "text_input: is missing"),
        ({"text_input": "x", "input_ids": [1]}, "text_input: give either"),
        ({"text_input": "word " * 3000}, "max_model_len"),
        ({"messages": "[]"}, "messages: must be an array"),
        ({"messages": '[{"role": "user"}]'}, "messages[0].content: must be"),
        ({"text_input": "x", "sampling_parameters": "["}, "sampling_parameters: is not valid"),
        ({"text_input": "x", "stop": [""]}, "stop: each string has 1 to 256"),
        ({"text_input": "x", "temprature": 1}, "did you mean temperature?"),
        ({"text_input": "x", "max_tokens": 10**6}, "max_tokens: must be at most max_model_len"),
        ({"input_ids": [10**6]}, "token ids must be from 0"),
        ({"text_input": "x", "stream": True, "exclude_input_in_output": False}, "When streaming"),
    ],
)
def test_a_mistake_is_named_whichever_step_finds_it(
    server: Server, model: str, fields: dict[str, Any], message: str
) -> None:
    for verb in ("generate", "generate_stream"):
        status, body = post(server, model, verb, fields)
        assert (status, message in body) == (400, True), body


@pytest.mark.server
def test_a_bad_call_is_its_own_affair(llm: Client) -> None:
    def ask(number: int) -> str:
        if number % 2:
            with pytest.raises(InvalidRequest, match="temperature: must be"):
                llm.generate("What does", temperature=-1)
            return ""
        return llm.generate(QUESTIONS[2].question, **GREEDY).text

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(48)))
    assert set(answers[::2]) == {"\n" + QUESTIONS[2].answer}


# --- leaving ----------------------------------------------------------------------------------


@pytest.mark.server
def test_a_small_call_passes_large_ones(llm: Client) -> None:
    """Their texts take seconds to tokenize, and are too long."""
    with ThreadPoolExecutor(60) as pool:
        large = [pool.submit(llm.generate, LONG_TEXT, max_tokens=1) for _ in range(60)]
        wait(large, return_when=FIRST_COMPLETED)
        llm.generate("What does", max_tokens=1)
        assert not all(call.done() for call in large)
        for call in large:
            with pytest.raises((InvalidRequest, Unavailable), match="prompt: has|queue_full: "):
                call.result()


@pytest.mark.server
def test_stop_strings_that_are_too_long_to_go_with_each_response(llm: Client) -> None:
    stop = [f"{number:0256}" for number in range(16)]
    with pytest.raises(InvalidRequest, match=r"^stop: has \d+ bytes, more than 4096 \(max_pass"):
        list(llm.stream("What does", max_tokens=2, stop=stop))
    assert list(llm.stream("What does", whole=True, max_tokens=2, stop=stop))


def start_long(client: Client, max_tokens: int) -> Any:
    """A stream of `max_tokens` tokens, after its first chunk."""
    stream = client.stream("What does", temperature=0, max_tokens=max_tokens, ignore_eos=True)
    next(stream)
    return stream


@pytest.mark.server
def test_a_stream_that_is_cancelled_gives_its_blocks_back(llm: Client, server: Server) -> None:
    with server.aborting(7):
        with ThreadPoolExecutor(8) as pool:
            streams = list(pool.map(start_long, [llm] * 8, [200, *[1500] * 7]))
        for stream in streams[1:]:
            stream.cancel()
        *_, last = streams[0]  # the one that stays goes on to its end
        assert last.finish_reason == "length"
    with pytest.raises(RequestCancelled):
        list(streams[1])


@pytest.mark.server
@pytest.mark.parametrize("model", [*OURS, "ensemble", "tensorrt_llm"])
def test_a_dropped_connection_gives_its_blocks_back(server: Server, model: str) -> None:
    host, port = server.running.http_url.removeprefix("http://").split(":")
    fields = {"text_input": "What does", "max_tokens": 1500}
    fields |= {"ignore_eos": True} if model in OURS else {"end_id": -1}
    fields["streaming" if model == "tensorrt_llm" else "stream"] = True
    body = json.dumps(fields)
    head = f"POST /v2/models/{model}/generate_stream HTTP/1.1\r\nHost: x\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    with server.aborting(1), socket.create_connection((host, int(port))) as connection:
        connection.sendall((head + body).encode())
        read_until(connection, b"data: ")


@pytest.mark.server
def test_the_program_cancels_a_call_that_waits(server: Server) -> None:
    """The ensemble cannot: no step of it hears of the caller before the first token."""
    with Client(server.running.grpc_url, "llm_bls", timeout=60) as bls, server.full():
        waiting = bls.stream("What does", max_tokens=4)
        server.wait_for("num_requests_waiting", 1)
        waiting.cancel()
        server.wait_for("num_requests_waiting", 0)
        assert server.metrics()["num_requests_running"] == MAX_NUM_SEQS


@pytest.mark.server
def test_a_call_can_be_ended_by_its_name(server: Server) -> None:
    fields = {"text_input": "What does", "max_tokens": 1500, "ignore_eos": True}
    wishes = {"call_id": "mine", "return_finish_reason": True, "pass_through": "a note"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, server, MODEL, **fields, **wishes)
        server.wait_for("num_requests_running", 1)
        for _ in range(6):  # enough to reach both instances, whichever has the request
            status, _ = post(server, MODEL, "generate", {"task": "cancel", "call_id": "mine"})
            assert status == 200
        assert answer.result(60)["finish_reason"] == "abort"
        assert answer.result()["pass_through"] == "a note"
    server.wait_for("kv_blocks_used", 0)
    for call_id in ("", "a b", "x" * 65):
        status, body = post(server, MODEL, "generate", fields | {"call_id": call_id})
        assert (status, "call_id: must have 1 to 64" in body) == (400, True)
    status, body = post(server, MODEL, "generate", {"task": "cancel"})
    assert (status, "call_id: is missing" in body) == (400, True)


@pytest.mark.server
@pytest.mark.parametrize("model", OURS)
def test_a_call_of_an_ensemble_can_be_named_by_a_parameter(server: Server, model: str) -> None:
    fields = {"text_input": "What does", "max_tokens": 1500, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool, server.aborting(1):
        answer = pool.submit(generate, server, model, **fields, call_id=f"my-{model}")
        server.wait_for("num_requests_running", 1)
        cancel = {"task": "cancel", "call_id": f"my-{model}"}
        assert post(server, MODEL, "generate", cancel)[0] == 200
        assert answer.result(60)["text_output"].startswith("What does")
    status, body = post(server, model, "generate", fields | {"call_id": "a b"})
    assert (status, "call_id: must have 1 to 64" in body) == (400, True)


# --- text that is whole, whatever the tokens --------------------------------------------------

TOKENIZERS = ("byte_level", "byte_fallback", "word_piece")


@contextmanager
def random_walks(backend: tokenizers.Tokenizer, folder: Path) -> Iterator[RunningServer]:
    """A model that walks at random over a tokenizer's tokens, with an ensemble."""
    make_markov_checkpoint(backend, folder / "checkpoint")
    repository = folder / "repository"
    options = {"model": str(folder / "checkpoint")}
    write_part_of_pipeline(repository, MODEL, options, OWN)
    with start_server(repository) as running:
        yield running


@pytest.mark.server
@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("byte_level", 60),
        *(pytest.param(kind, 1000, marks=pytest.mark.soak) for kind in TOKENIZERS),
    ],
)
def test_joined_streams_are_the_one_shot_decode(tmp_path: Path, kind: str, number: int) -> None:
    """Of random sequences, half of which spell text, the others mostly none."""
    backend = KINDS[kind]()  # training is not reproducible

    def walk(seed: int, longest: int = 24) -> list[str]:
        valid, skip = seed % 2 == 0, seed % 4 < 2
        token_ids: list[int] = []
        texts: list[str] = []
        wishes = {"temperature": TEXT if valid else ANYTHING, "skip_special_tokens": skip}
        length = random.Random(seed).randint(1, longest)
        with client.stream([1], seed=seed, max_tokens=length, **wishes) as stream:
            for chunk in stream:
                token_ids += chunk.token_ids
                texts.append(chunk.text)
        assert len(token_ids) == length
        assert len(texts) == length or longest > MAX_BEHIND
        prompt, whole = (
            backend.decode(ids, skip_special_tokens=skip) for ids in ([1], [1, *token_ids])
        )
        assert prompt + "".join(texts) == whole, token_ids
        if valid and not ends_within_character(backend, token_ids):
            assert "\N{REPLACEMENT CHARACTER}" not in "".join(texts)
        return texts

    with (
        random_walks(backend, tmp_path) as running,
        Client(running.grpc_url, "llm", timeout=60) as client,
        ThreadPoolExecutor(16) as pool,
    ):
        walks = list(pool.map(walk, range(number)))
        # How many pieces these came in depends on the machine. An answer of this length that
        # nothing runs beside always comes token by token.
        for seed in range(20):
            walk(seed, MAX_BEHIND)
    whole = "".join(text for texts in walks[::2] for text in texts)
    assert sum(character > "\x7f" for character in whole) > number


# --- a step that is too slow ------------------------------------------------------------------

SLOW_POSTPROCESS = """\
import time
from paged_backend.serving.postprocess import TritonPythonModel as Fast

class TritonPythonModel(Fast):
    def execute(self, requests):
        time.sleep(0.05 * len(requests))
        return super().execute(requests)
"""


@pytest.mark.server
@pytest.mark.soak
def test_a_slow_step_delays_its_own_streams_only(tmp_path: Path) -> None:
    """Whatever waits for it keeps its order, nothing is lost, and the model goes on for others.

    A server of 25.11 or later bounds what waits; the one here cannot.
    """
    write_part_of_pipeline(tmp_path, MODEL, {"model": "demo"}, OWN)
    (tmp_path / "postprocess" / "1" / "model.py").write_text(SLOW_POSTPROCESS)
    questions = QUESTIONS[:8]
    with (
        start_server(tmp_path) as running,
        Client(running.grpc_url, "llm", timeout=60) as slow,
        Client(running.grpc_url, MODEL, timeout=60) as direct,
        ThreadPoolExecutor(8) as pool,
    ):
        answers = [pool.submit(slow.generate, q.question, **GREEDY) for q in questions]
        assert direct.generate(QUESTIONS[9].question, **GREEDY).text == "\n" + QUESTIONS[9].answer
        assert not any(answer.done() for answer in answers)
        assert [answer.result().text for answer in answers] == ["\n" + q.answer for q in questions]


# --- the repository -----------------------------------------------------------------------------


def test_the_bundled_repository_is_the_written_one(tmp_path: Path) -> None:
    write_pipeline(tmp_path, MODEL, {"model": "demo"}, instances=1, bounded=False)

    def content(root: Path) -> dict[str, str]:
        files = [path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc"]
        return {str(path.relative_to(root)): path.read_text() for path in files}

    assert content(tmp_path) == content(BUNDLED)


def test_serve_writes_a_pipeline_if_asked(tmp_path: Path) -> None:
    command = [PAGED_BACKEND, "serve", "demo", "--pipeline", "--write-to", tmp_path]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=60)
    assert {MODEL, *OURS, *TENSORRTLLM} < set(model_names(tmp_path / "models"))


def test_serve_refuses_options_of_a_pipeline_without_one() -> None:
    for flags, problem in (
        (["--decoupled-mode", "false"], "need --pipeline"),
        (["--pipeline", "--triton-max-batch-size", "-1"], "must be at least 0, got -1"),
    ):
        command = [PAGED_BACKEND, "serve", "demo", *flags]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (run.returncode, run.stdout) == (2, "")
        assert problem in run.stderr


def test_only_servers_that_know_the_bound_are_told_of_it(tmp_path: Path) -> None:
    assert not knows_the_bound({})
    assert not knows_the_bound({"TRITON_SERVER_VERSION": "2.51.0"})
    assert not knows_the_bound({"TRITON_SERVER_VERSION": "unknown"})
    assert knows_the_bound({"TRITON_SERVER_VERSION": "2.63.0"})
    assert knows_the_bound({"TRITON_SERVER_VERSION": "3.0.0"})
    for bounded in (False, True):
        folder = tmp_path / str(bounded)
        write_pipeline(folder, MODEL, {"model": "demo"}, instances=1, bounded=bounded)
        config = (folder / "llm" / "config.pbtxt").read_text()
        assert (f"max_inflight_requests: {MAX_INFLIGHT_REQUESTS}" in config) == bounded


def test_pipelines_stand_side_by_side_under_prefixes(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "one", {}, 1, prefix="one.")
    write_pipeline(tmp_path, "two", {}, 1, prefix="two.")
    names = model_names(tmp_path)
    assert len(names) == 2 * (5 + len(TENSORRTLLM))
    assert {"one", "one.llm", "two.ensemble", "two.postprocess"} <= set(names)
    with pytest.raises(ConfigError, match="model name"):
        write_pipeline(tmp_path, "three", {}, 1, prefix="../")
    with pytest.raises(ConfigError, match="there already"):
        write_pipeline(tmp_path, "llm", {}, 1)

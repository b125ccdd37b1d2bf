"""Several models and several servers behind one gateway, and the gateway as a process."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
from gateways import MODEL, Gateway, running_gateway
from metrics_page import read_metrics
from paged_client import Client, Unavailable

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.cli import main
from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server
from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server
QUESTION = load_questions()[0]
NOBODY = "127.0.0.1:1"
OTHER_KIND = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]})
        config.add_input({"name": "input_ids", "data_type": "TYPE_INT32", "dims": [-1]})
        config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]})
        return config
"""


def write_models(root):
    """The same model as elsewhere, one with a template of its own, and one of another kind."""
    write_model_repository(root, MODEL, {"model": "demo"}, instances=1)
    checkpoint = root.parent / "checkpoint"
    shutil.copytree(MODEL_DIR, checkpoint)
    config = checkpoint / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values["chat_template"] = "{{ messages[-1]['content'] }}\n"
    config.write_text(json.dumps(values))
    write_model_repository(root, "bare", {"model": str(checkpoint)}, instances=1)
    folder = write_model_repository(root, "other_kind", {}, instances=1)
    (folder / "1" / "model.py").write_text(OTHER_KIND)


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """Another server."""
    root = tmp_path_factory.mktemp("second") / "models"
    root.mkdir()
    write_models(root)
    with start_server(root) as running:
        yield running


def complete(gateway: Gateway, prompt: str, **fields):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **fields}
    response = gateway.post("/v1/completions", body)
    assert response.status == 200, response.body
    return response.json


def routed(gateway: Gateway) -> dict[str, float]:
    """How many prompts each server got so far."""
    counts: dict[str, float] = {}
    for name, value in gateway.metrics("paged_gateway_routed_total").items():
        server = re.search(r'server="(.*?)"', name)[1]
        counts[server] = counts.get(server, 0) + value
    return counts


def test_each_model_has_its_own_template_and_other_kinds_are_not_listed(second):
    with running_gateway("--triton", second.grpc_url) as gateway:
        listed = gateway.get("/v1/models").json["data"]
        assert [model["id"] for model in listed] == ["bare", MODEL]
        chat = {"messages": [{"role": "user", "content": QUESTION.question}], "temperature": 0}
        answers = {
            model: gateway.post("/v1/chat/completions", chat | {"model": model}).json
            for model in ("bare", MODEL)
        }
        assert answers["bare"]["choices"][0]["message"]["content"].strip() == QUESTION.answer
        assert answers["bare"]["usage"]["prompt_tokens"] < answers[MODEL]["usage"]["prompt_tokens"]
        ambiguous = gateway.post("/v1/chat/completions", chat)
        assert (ambiguous.status, ambiguous.error["param"]) == (404, "model")
        assert gateway.post("/v1/completions", chat | {"model": "other_kind"}).status == 400


def test_the_only_model_needs_no_name(gateway):
    answer = gateway.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).json
    assert answer["model"] == MODEL


def test_a_beginning_goes_back_to_the_server_that_knows_it(server, second):
    servers = (server.running.grpc_url, second.grpc_url)
    with running_gateway(*(flag for url in servers for flag in ("--triton", url))) as gateway:
        prompts = [f"Conversation {n}: " + f"it is about {n}. " * 20 for n in range(6)]
        for prompt in prompts:
            complete(gateway, prompt)
        assert routed(gateway) == dict.fromkeys(servers, 3)
        for prompt in prompts:
            for end in ("And then?", "Go on.", "Why?"):
                details = complete(gateway, prompt + end)["usage"]["prompt_tokens_details"]
                assert details["cached_tokens"] > 60
        assert routed(gateway) == dict.fromkeys(servers, 12)


def test_a_trusted_router_says_where_a_request_goes(server, second):
    """By a session, or by the address of the server with the blocks, which may not exist."""
    servers = (server.running.grpc_url, second.grpc_url)
    flags = [flag for url in servers for flag in ("--triton", url)]
    with running_gateway(*flags, "--trust-routing-headers") as gateway:

        def server_of(number: int, **headers: str) -> str:
            before = routed(gateway)
            body = {"model": MODEL, "prompt": f"{number} words of its own", "max_tokens": 1}
            assert gateway.post("/v1/completions", body, **headers).status == 200
            (chosen,) = [s for s, count in routed(gateway).items() if count != before.get(s, 0)]
            return chosen

        assert len({server_of(number, **{"x-session-id": "one"}) for number in range(4)}) == 1
        for number, url in enumerate([*servers, *servers], 10):
            assert server_of(number, **{"x-kv-cache-source-host-port": url}) == url
        nowhere = {"x-kv-cache-source-host-port": "10.255.0.1:8000"}
        assert server_of(20, **nowhere) in servers


def test_models_are_found_on_the_servers_that_have_them(server, second):
    flags = ("--triton", server.running.grpc_url, "--triton", second.grpc_url)
    with running_gateway(*flags) as gateway:
        assert len(gateway.get("/v1/models").json["data"]) == 2
        before = routed(gateway)[server.running.grpc_url]
        for _ in range(4):
            complete(gateway, "x", model="bare")
        assert routed(gateway)[server.running.grpc_url] == before


def test_a_server_that_is_not_there_is_skipped(server):
    with running_gateway("--triton", NOBODY, "--triton", server.running.grpc_url) as gateway:
        for number in range(8):
            complete(gateway, f"{number}" * 100)
        assert routed(gateway) == {server.running.grpc_url: 8}
        assert gateway.metrics()[f'server_up{{server="{NOBODY}"}}'] == 0


def test_a_server_that_dies_is_left(server, second):
    """In mid-stream that is an error; a request that meets it dead goes to the other one.

    No test after this one can use the second server.
    """
    prompts = [f"{n} " * 100 for n in range(4)]
    # This gateway does not look at its servers by itself, so that a request finds one dead.
    before = "from paged_client.gateway import backend_pool\nbackend_pool.REFRESH_S = 3600.0"
    flags = ("--triton", server.running.grpc_url, "--triton", second.grpc_url)
    with (
        running_gateway(*flags, before=before) as gateway,
        running_gateway(*flags) as other,
        other.sdk() as api,
    ):
        for prompt in prompts:
            complete(gateway, prompt)
        assert routed(gateway)[second.grpc_url] == 2
        streams = [
            api.completions.create(
                model=MODEL,
                prompt=prompt,
                max_tokens=1500,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            for prompt in prompts[:2]
        ]
        for stream in streams:
            next(stream)
        second.kill()
        assert sorted(map(ending, streams)) == ["503", "length"]
        for prompt in prompts:
            complete(gateway, prompt)
        assert gateway.metrics()["retries_total"] >= 1
        assert gateway.get("/health").status == 200


def ending(stream) -> str:
    """The finish reason of a stream, or 503 for the error that says so."""
    try:
        return [chunk.choices[0].finish_reason for chunk in stream][-1]
    except openai.APIError as error:
        assert error.body["code"] == "unavailable"
        return "503"


def test_without_any_server_there_is_503_and_then_there_is_not(tmp_path):
    with running_gateway("--triton", NOBODY) as gateway:
        response = gateway.post("/v1/completions", {"model": MODEL, "prompt": "x"})
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert response.error["type"] == "server_error"
        assert gateway.get("/health").status == 503
        assert gateway.get("/v1/models").json["data"] == []


def test_told_to_stop_it_lets_streams_finish(server, gateway):
    with running_gateway("--triton", server.running.grpc_url) as ending:
        with ending.sdk() as api:
            stream = api.completions.create(
                model=MODEL,
                prompt="What does",
                max_tokens=200,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            next(stream)
            ending.process.send_signal(signal.SIGTERM)
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        assert ending.process.wait(10) == 0


def test_told_to_stop_it_refuses_requests_and_ends_those_that_run_too_long(server):
    flags = ("--triton", server.running.grpc_url, "--drain-timeout", "2")
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    with running_gateway(*flags) as ending, ThreadPoolExecutor() as threads, ending.sdk() as api:
        stream = api.completions.create(
            model=MODEL,
            prompt="What does",
            max_tokens=1900,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        whole = threads.submit(ending.post, "/v1/completions", body)
        server.wait_for("num_requests_running", 2)
        ending.process.send_signal(signal.SIGTERM)
        while ending.get("/health").status == 200:
            time.sleep(0.01)
        for response in (ending.post("/v1/completions", body), ending.get("/health")):
            assert (response.status, response.headers["retry-after"]) == (503, "1")
            assert response.error["code"] == "draining"
        with pytest.raises(openai.APIError, match="draining: the gateway stops") as caught:
            list(stream)
        assert caught.value.body["code"] == "draining"
        assert (whole.result().status, whole.result().error["code"]) == (503, "draining")
        assert ending.process.wait(10) == 0


def test_serve_starts_a_gateway_that_ends_with_it(monkeypatch):
    """The model has two names, and its engine is not started again."""
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics", "openai")]
    names = ("--served-model-name", "org/toy", "gpt-4o:latest")
    flags = [*names, *ports, "--engine-restart-timeout-s=0"]
    command = [sys.executable, "-m", "paged_backend.cli", "serve", "demo", *flags]
    monkeypatch.setenv("PAGED_API_KEYS", "secret")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        line = launcher.stdout.readline()
        ready = re.match(
            r"toy is ready: HTTP \S+, gRPC (\S+), metrics (\S+), OpenAI http://(\S+)/v1$", line
        )
        assert ready is not None, line
        gateway = Gateway(launcher, ready[3])
        assert gateway.get("/v1/models").status == 401
        with gateway.sdk("secret") as api:
            assert [model.id for model in api.models.list()] == ["org/toy", "gpt-4o:latest"]
            for name in ("org/toy", "gpt-4o:latest", "toy"):
                answer = api.completions.create(
                    model=name, prompt=QUESTION.question, temperature=0, max_tokens=64
                )
                assert answer.model == "org/toy"
                assert answer.choices[0].text == "\n" + QUESTION.answer
        assert gateway.get("/health").status == 200
        processes = psutil.Process(launcher.pid).children(recursive=True)
        with Client(ready[1], "toy", timeout=60) as client:
            streams_end_with_their_engine(client, processes, gateway)
        assert read_metrics(ready[2])["engine_up"] == 0
        key = {"Authorization": "Bearer secret"}
        response = gateway.post("/v1/completions", {"prompt": "x"}, **key)
        assert (response.status, response.error["code"]) == (503, "engine_dead")
        assert response.headers["retry-after"] == "1"
        assert gateway.get("/health").status == 503
        assert gateway.get("/v1/models", **key).json["data"] == []
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 0
    assert not psutil.wait_procs(processes, timeout=5)[1]


def streams_end_with_their_engine(client, processes, gateway):
    """Streams of a killed engine end at once, and no thread of the stub polls afterwards."""
    (stub,) = [p for p in processes if any("backend_stub" in arg for arg in p.cmdline()[:1])]
    streams = [client.stream(QUESTION.question, max_tokens=1800, ignore_eos=True) for _ in range(4)]
    for stream in streams:
        next(stream)
    kill_engine(processes, gateway)
    for stream in streams:
        with pytest.raises(Unavailable, match="engine_dead"):
            list(stream)
    with pytest.raises(Unavailable, match="engine_dead"):
        client.generate(QUESTION.question)
    before, since = num_waits(stub.pid), time.monotonic()
    time.sleep(1.0)
    waits = num_waits(stub.pid) - before
    assert waits < 200 * (time.monotonic() - since), "it polls for nothing"


def num_waits(pid: int) -> int:
    """Return the number of waits of all threads of a process."""
    statuses = (file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/status"))
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in statuses)


def kill_engine(processes, gateway):
    """And wait until its server knows, which is not at once."""
    (engine,) = [p for p in processes if any("engine_process" in arg for arg in p.cmdline())]
    engine.kill()
    deadline = time.monotonic() + 10
    while gateway.get("/health").status == 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_port_in_use_is_said_before_the_model_loads(gateway):
    started = time.monotonic()
    for command in (f"gateway --port {gateway.port}", f"serve demo --openai-port {gateway.port}"):
        run = subprocess.run(
            [sys.executable, "-m", "paged_backend.cli", *command.split()],
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert (run.returncode, run.stdout) == (2, "")
        assert f"port: port {gateway.port} is in use" in run.stderr
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--api-key-file", "missing"), "cannot read missing"),
        (("--request-timeout", "0"), "--request-timeout: must be above 0, got 0"),
        (("--triton", "http://127.0.0.1:8000"), "--triton: must be host:port"),
        (("--max-body-bytes", "1"), "--max-body-bytes: must be from 1024 to 16777216, got 1"),
        (("--max-stream-backlog", "0"), "--max-stream-backlog: must be at least 1, got 0"),
        (("--drain-timeout", "-1"), "--drain-timeout: must be at least 0, got -1"),
        (("--port", "70000"), "--port: must be between 0 and 65535"),
    ],
)
def test_what_cannot_start_is_one_line(capsys, flags, problem):
    assert main(["gateway", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("paged-backend: error: ") and problem in line

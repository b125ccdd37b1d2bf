"""vllm_backend's contract on the wire, by models of two lines of config.pbtxt."""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from paged_backend.launch import server_process
from paged_backend.launch.server_process import RunningServer, start_server
from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server

MODEL = "vllm_model"
COMMAND = server_process.server_command
TWO_LINES = 'backend: "{backend}"\ninstance_group [{{ count: 1 kind: KIND_MODEL }}]\n'
PARAMETER = 'parameters: {{ key: "{key}" value: {{ string_value: "{value}" }} }}\n'
DECLARED = 'input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]\n'
QUESTION = load_questions()[0]
ENDLESS = {"max_tokens": 1500, "ignore_eos": True}


@dataclass
class Server:
    """A running server, its models and the file of its log."""

    running: RunningServer
    repository: Path
    log_file: Path

    def request(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, str]:
        """Status and body of an HTTP request; a POST where there is a body."""
        connection = http.client.HTTPConnection(self.running.http_url[7:], timeout=60)
        method, data = ("GET", None) if body is None else ("POST", json.dumps(body))
        connection.request(method, path, data)
        response = connection.getresponse()
        text = response.read().decode()
        connection.close()
        return response.status, text

    def config(self, model: str) -> dict[str, Any]:
        return json.loads(self.request(f"/v2/models/{model}/config")[1])

    def load(self, model: str) -> tuple[int, str]:
        return self.request(f"/v2/repository/models/{model}/load", {})

    def log(self) -> str:
        return self.log_file.read_text()

    def metrics(self) -> str:
        address = self.running.metrics_url.removeprefix("http://").removesuffix("/metrics")
        connection = http.client.HTTPConnection(address, timeout=10)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        return text

    def infer(
        self, model: str = MODEL, parameters: dict[str, Any] | None = None, **tensors: Any
    ) -> list[Answer]:
        """All responses to one request over a gRPC stream, as its client sees them."""
        answers: list[Answer] = []
        ended = threading.Event()

        def take(result: InferResult | None, error: InferenceServerException | None) -> None:
            answers.append(Answer(result, error))
            if error is not None or answers[-1].is_final:
                ended.set()

        with InferenceServerClient(self.running.grpc_url) as client:
            client.start_stream(take)
            client.async_stream_infer(
                model, inputs_of(tensors), parameters=parameters, enable_empty_final_response=True
            )
            assert ended.wait(60)
            client.stop_stream()
        return answers

    def text(self, **more: Any) -> str:
        """The only answer, which must be no error."""
        (answer,) = self.infer(**more)
        return answer.text


@dataclass
class Answer:
    """One response, or an error in place of it."""

    result: InferResult | None
    error: InferenceServerException | None

    @property
    def is_final(self) -> bool:
        return bool(self.result.get_response().parameters["triton_final_response"].bool_param)

    @property
    def names(self) -> set[str]:
        assert self.result is not None, self.error
        return {output.name for output in self.result.get_response().outputs}

    def __getitem__(self, name: str) -> Any:
        assert self.result is not None, self.error
        return self.result.as_numpy(name)

    @property
    def text(self) -> str:
        return self["text_output"][0].decode()


def inputs_of(tensors: dict[str, Any]) -> list[InferInput]:
    inputs = []
    for name, value in tensors.items():
        array = np.array(value if isinstance(value, list) else [value])
        if array.dtype.kind == "U":
            array = np.array([text.encode() for text in array], dtype=np.object_)
        inputs.append(InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def add_model(
    repository: Path, name: str, options: dict[str, Any], *more: str, backend: str = "vllm"
) -> Path:
    version = repository / name / "1"
    version.mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(
        TWO_LINES.format(backend=backend) + "".join(more)
    )
    (version / "model.json").write_text(json.dumps(options))
    return version / "model.json"


def parameter(key: str, value: str) -> str:
    return PARAMETER.format(key=key, value=value)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("vllm")
    repository, log_file = root / "models", root / "server.log"
    options = {
        **{"model": "demo", "gpu_memory_utilization": "0.5", "enforce_eager": "true"},
        **{"disable_log_requests": True, "swap_space": 4, "data_parallel_size_local": 1},
    }
    add_model(repository, MODEL, options, parameter("REPORT_CUSTOM_METRICS", "True"))
    declared = {"model": "demo", "stream_interval": 5}
    add_model(repository, "declared", declared, DECLARED, backend="paged")
    with serving(repository, log_file, "--model-control-mode=explicit", "--load-model=*") as server:
        yield server


@contextmanager
def serving(repository: Path, log_file: Path, *flags: str) -> Iterator[Server]:
    """A server with more flags, whose log goes to a file."""

    def with_flags(files: Any, models: Path, endpoints: Any, log: Path | None) -> Any:
        argv, variables = COMMAND(files, models, endpoints, log_file)
        return [*argv, *flags], variables

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_process, "server_command", with_flags)
        with start_server(repository) as running:
            yield Server(running, repository, log_file)


# --- the model's configuration ----------------------------------------------------------------

INPUTS = {
    "image": ("TYPE_STRING", -1),
    "stream": ("TYPE_BOOL", 1),
    "sampling_parameters": ("TYPE_STRING", 1),
    "exclude_input_in_output": ("TYPE_BOOL", 1),
    "return_finish_reason": ("TYPE_BOOL", 1),
    "return_cumulative_logprob": ("TYPE_BOOL", 1),
    "return_logprobs": ("TYPE_BOOL", 1),
    "return_num_input_tokens": ("TYPE_BOOL", 1),
    "return_num_output_tokens": ("TYPE_BOOL", 1),
    "embedding_request": ("TYPE_STRING", 1),
}
OUTPUTS = {
    "text_output": ("TYPE_STRING", -1),
    "finish_reason": ("TYPE_STRING", -1),
    "cumulative_logprob": ("TYPE_FP32", -1),
    "logprobs": ("TYPE_STRING", -1),
    "num_input_tokens": ("TYPE_UINT32", 1),
    "num_output_tokens": ("TYPE_UINT32", -1),
}


def test_two_lines_are_completed_to_the_contract(vllm):
    config = vllm.config(MODEL)
    assert (config["backend"], config["max_batch_size"]) == ("vllm", 0)
    assert config["model_transaction_policy"] == {"decoupled": True}
    inputs = {tensor["name"]: tensor for tensor in config["input"]}
    outputs = {tensor["name"]: tensor for tensor in config["output"]}
    assert (inputs["text_input"]["data_type"], inputs["text_input"]["dims"]) == ("TYPE_STRING", [1])
    for name, (data_type, dims) in INPUTS.items():
        found = inputs[name]
        assert (found["data_type"], found["dims"], found["optional"]) == (data_type, [dims], True)
    for name, (data_type, dims) in OUTPUTS.items():
        assert (outputs[name]["data_type"], outputs[name]["dims"]) == (data_type, [dims])


def test_what_the_user_declared_is_kept(vllm):
    config = vllm.config("declared")
    declared = [tensor for tensor in config["input"] if tensor["name"] == "text_input"]
    assert (config["backend"], [tensor["optional"] for tensor in declared]) == ("paged", [False])
    assert vllm.text(model="declared", text_input=QUESTION.question, parameters={"temperature": 0})


def test_options_without_effect_are_one_line_in_the_log(vllm):
    lines = [line for line in vllm.log().splitlines() if "without effect" in line]
    assert len(lines) == 1
    assert "[vllm] model.json" in lines[0]
    for name in ("disable_log_requests", "swap_space", "data_parallel_size_local"):
        assert name in lines[0]
    assert "gpu_memory_utilization" not in lines[0]


# --- one response, many responses -------------------------------------------------------------


def test_a_stream_is_one_response_for_each_token_and_the_last_data_is_final(vllm):
    fields = {"return_finish_reason": True, "return_num_input_tokens": True}
    answers = vllm.infer(
        parameters={"temperature": 0, "ignore_eos": True},
        text_input=QUESTION.question,
        stream=True,
        return_num_output_tokens=True,
        **fields,
    )
    assert [answer.is_final for answer in answers] == [False] * 15 + [True]
    reasons = [answer["finish_reason"].tolist() for answer in answers]
    assert reasons == [[b"None"]] * 15 + [[b"length"]]
    assert [answer["num_output_tokens"].tolist() for answer in answers] == [[1]] * 16
    for answer in answers:
        assert answer["num_input_tokens"].shape == ()
        assert 0 < answer["num_input_tokens"] <= len(QUESTION.question)
    whole = vllm.text(
        parameters={"temperature": 0, "ignore_eos": True},
        text_input=QUESTION.question,
        exclude_input_in_output=True,
    )
    assert "".join(answer.text for answer in answers) == whole


def test_stream_interval_is_the_number_of_tokens_in_a_response(vllm):
    fields = {"parameters": {"temperature": 0, "ignore_eos": True}, "text_input": QUESTION.question}
    answers = vllm.infer("declared", stream=True, return_num_output_tokens=True, **fields)
    # The first token is sent at once. The others arrive in fives, or more if the engine is ahead.
    counts = [int(answer["num_output_tokens"][0]) for answer in answers]
    assert (counts[0], sum(counts)) == (1, 16)
    assert all(count >= 5 for count in counts[1:-1])
    assert [answer.is_final for answer in answers] == [False] * (len(answers) - 1) + [True]
    whole = vllm.text(exclude_input_in_output=True, **fields)
    assert "".join(answer.text for answer in answers) == whole


@pytest.mark.parametrize("exclude", [None, False, True])
def test_a_whole_answer_is_one_final_response_after_the_prompt(vllm, exclude):
    tensors = {} if exclude is None else {"exclude_input_in_output": exclude}
    (answer,) = vllm.infer(
        text_input=QUESTION.question, parameters={"temperature": 0, "max_tokens": 64}, **tensors
    )
    assert answer.is_final
    assert answer.text == ("" if exclude else QUESTION.question) + "\n" + QUESTION.answer


def test_a_stream_with_its_prompt_is_refused_in_vllm_backends_words(vllm):
    (answer,) = vllm.infer(text_input="x", stream=True, exclude_input_in_output=False)
    assert answer.error.message() == (
        "Error generating stream: When streaming, `exclude_input_in_output` = False is not allowed."
    )


@pytest.mark.parametrize("asked", [{}, {"return_finish_reason": False, "return_logprobs": False}])
def test_additional_outputs_come_only_when_asked_for(vllm, asked):
    for stream in (False, True):
        for answer in vllm.infer(text_input="Tell me", stream=stream, **asked):
            assert answer.names == {"text_output"}


def test_n_answers_are_n_elements(vllm):
    (answer,) = vllm.infer(
        text_input="What does",
        parameters={"n": 3, "seed": 1, "ignore_eos": True},
        return_finish_reason=True,
        return_num_output_tokens=True,
        return_cumulative_logprob=True,
        return_logprobs=True,
    )
    assert answer["text_output"].shape == (3,)
    assert answer["finish_reason"].tolist() == [b"length"] * 3
    assert answer["num_output_tokens"].tolist() == [16] * 3
    assert answer["logprobs"].tolist() == [b"null"] * 3
    assert np.isnan(answer["cumulative_logprob"]).all()


# --- sampling parameters ----------------------------------------------------------------------


def num_tokens(answer: Answer) -> int:
    return int(answer["num_output_tokens"].sum())


def test_strings_are_read_as_numbers_and_truth_values(vllm):
    values = {"temperature": "0.1", "top_p": "0.95", "max_tokens": "5", "ignore_eos": "True"}
    asked = {"text_input": "Tell me", "return_num_output_tokens": True}
    (by_tensor,) = vllm.infer(sampling_parameters=json.dumps(values), **asked)
    (by_parameters,) = vllm.infer(parameters=values, **asked)
    assert num_tokens(by_tensor) == num_tokens(by_parameters) == 5


def test_the_tensor_comes_before_the_request_parameters(vllm):
    (answer,) = vllm.infer(
        text_input="Tell me",
        sampling_parameters=json.dumps({"max_tokens": 3, "ignore_eos": True}),
        parameters={"max_tokens": 7, "no_such_parameter": 1},
        return_num_output_tokens=True,
    )
    assert num_tokens(answer) == 3


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"sampling_parameters": '{"temprature": 1}'}, "did you mean temperature?"),
        ({"sampling_parameters": '{"top_p": "much"}'}, "top_p: must be a number"),
        ({"image": "aGVsbG8="}, "image: cannot be used"),
        ({"embedding_request": "{}"}, "embedding_request: cannot be used"),
    ],
)
def test_a_wrong_field_is_named(vllm, tensors, message):
    (answer,) = vllm.infer(text_input="x", **tensors)
    assert message in answer.error.message()


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_json_for_the_tokens_of_the_response(vllm, stream):
    values = {"temperature": 0, "logprobs": 2, "ignore_eos": True, "skip_special_tokens": False}
    answers = vllm.infer(
        text_input=QUESTION.question,
        stream=stream,
        exclude_input_in_output=True,
        sampling_parameters=json.dumps(values),
        return_logprobs=True,
        return_cumulative_logprob=True,
        return_num_output_tokens=True,
    )
    total = 0.0
    for answer in answers:
        (logprobs,) = map(json.loads, answer["logprobs"])
        assert len(logprobs) == num_tokens(answer)
        for entries in logprobs:
            assert 2 <= len(entries) <= 3
            assert sorted(entry["rank"] for entry in entries.values())[:2] == [1, 2]
            first = next(iter(entries.values()))
            assert (first["rank"], first["logprob"] <= 0) == (1, True)
            total += first["logprob"]
        texts = [next(iter(entries.values()))["decoded_token"] for entries in logprobs]
        assert "".join(texts) == answer.text
        assert answer["cumulative_logprob"][0] == pytest.approx(total, rel=1e-4)
    assert not math.isnan(total)


# --- cancellation -----------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_cancelled_request_is_logged_and_answered_as_there(vllm, stream):
    before = vllm.log().count("[vllm] Successfully cancelled the request")
    answers: list[Answer] = []
    with InferenceServerClient(vllm.running.grpc_url) as client:
        client.start_stream(lambda result, error: answers.append(Answer(result, error)))
        tensors = {"text_input": "What does", "stream": stream}
        client.async_stream_infer(MODEL, inputs_of(tensors), parameters=ENDLESS)
        wait_for(vllm, "vllm:num_requests_running", 1)
        client.stop_stream(cancel_requests=True)
    wait_for(vllm, "vllm:num_requests_running", 0)
    assert answers[-1].error.status() == "StatusCode.CANCELLED"
    deadline = time.monotonic() + 60
    while vllm.log().count("[vllm] Successfully cancelled the request") == before:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert vllm.log().count("[vllm] Cancelling the request") == before + 1


# --- metrics ----------------------------------------------------------------------------------

FIRST_TOKEN = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10"
BUCKETS = {
    "time_to_first_token_seconds": FIRST_TOKEN,
    "time_per_output_token_seconds": "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5",
    "e2e_request_latency_seconds": "1 2.5 5 10 15 20 30 40 50 60",
    "request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000",
    "request_generation_tokens": "1 2 5 10 20 50 100 200 500 1000 2000",
    "request_params_n": "1 2 5 10 20",
}
COUNTERS = ["prompt_tokens_total", "generation_tokens_total", "num_preemptions_total"]
COUNTERS += ["prefix_cache_queries_total", "prefix_cache_hits_total"]
GAUGES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
LABELS = {"model": MODEL, "version": "1"}


def samples(server: Server) -> dict[str, dict[str, float]]:
    """Name of a metric -> value by bucket ("" where it has none), of the vllm model."""
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in re.findall(r"^(\S+?)\{(.*)\} (\S+)$", server.metrics(), re.M):
        named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        if LABELS.items() <= named.items():
            found.setdefault(name, {})[named.get("le", "")] = float(value)
    return found


def wait_for(server: Server, name: str, value: float) -> None:
    deadline = time.monotonic() + 60
    while samples(server)[name][""] != value:
        assert time.monotonic() < deadline, (name, samples(server)[name])
        time.sleep(0.01)


def test_all_families_are_there_with_their_buckets(vllm):
    text, found = vllm.metrics(), samples(vllm)
    for name in COUNTERS:
        assert f"# TYPE vllm:{name} counter" in text
    for name in GAUGES:
        assert f"# TYPE vllm:{name} gauge" in text
    for name, bounds in BUCKETS.items():
        assert f"# TYPE vllm:{name} histogram" in text
        assert " ".join(found[f"vllm:{name}_bucket"]) == bounds + " +Inf"
    assert 'vllm:prompt_tokens_total{model="declared"' not in text


def test_metrics_count_calls_and_tokens(vllm):
    """The counts of a request are there when its last response is."""
    num_prompt_tokens = before_prompt(vllm)
    for _ in range(10):
        before = samples(vllm)
        for n in (1, 2):
            vllm.infer(text_input="Tell me", stream=n == 1, parameters={"n": n, "ignore_eos": True})
        after = samples(vllm)
        for name, value in {
            "prompt_tokens_total": 2 * num_prompt_tokens,
            "generation_tokens_total": 48,
            "num_requests_running": 0,
        }.items():
            assert grown(before, after, f"vllm:{name}") == value, name
        for name, (number, total) in {
            "time_to_first_token_seconds": (2, None),
            "time_per_output_token_seconds": (15 + 30, None),
            "e2e_request_latency_seconds": (2, None),
            "request_prompt_tokens": (2, 2 * num_prompt_tokens),
            "request_generation_tokens": (2, 48),
            "request_params_n": (2, 3),
        }.items():
            assert grown(before, after, f"vllm:{name}_count") == number, name
            assert grown(before, after, f"vllm:{name}_bucket", "+Inf") == number
            assert grown(before, after, f"vllm:{name}_sum") > 0
            if total is not None:
                assert grown(before, after, f"vllm:{name}_sum") == total
        assert grown(before, after, "vllm:request_params_n_bucket", "1") == 1


def before_prompt(server: Server) -> int:
    (answer,) = server.infer(model="declared", text_input="Tell me", return_num_input_tokens=True)
    return int(answer["num_input_tokens"])


def grown(before: Any, after: Any, name: str, bucket: str = "") -> float:
    return after[name][bucket] - before[name][bucket]


# --- the generate extension -------------------------------------------------------------------


def generate(server: Server, verb: str = "generate", **fields: Any) -> tuple[int, Any]:
    status, text = server.request(f"/v2/models/{MODEL}/{verb}", fields)
    if verb == "generate":
        return status, json.loads(text)
    return status, [json.loads(line[6:]) for line in text.split("\n\n") if line]


def test_plain_json_fields_and_lists(vllm):
    asked = {"text_input": QUESTION.question, "temperature": 0, "max_tokens": 64}
    whole = "\n" + QUESTION.answer
    stop = QUESTION.answer.split()[2]
    _, answer = generate(vllm, **asked, exclude_input_in_output=True, stop=[stop, "never"])
    assert answer["text_output"] == whole[: whole.index(stop)]
    _, events = generate(vllm, "generate_stream", **asked, stream=True, stop=[stop])
    assert "".join(event["text_output"] for event in events) == whole[: whole.index(stop)]
    _, nested = generate(vllm, **{"text_input": QUESTION.question, "parameters": {"max_tokens": 2}})
    assert len(nested["text_output"]) < len(QUESTION.question + whole)
    first = json.loads(vllm.infer(**logprobs_of_one()).pop()["logprobs"][0])[0]
    likeliest = int(next(iter(first)))
    for lists in (
        {"stop_token_ids": [likeliest]},
        {"sampling_parameters": json.dumps({"temperature": 0, "stop_token_ids": [likeliest]})},
    ):
        status, answer = generate(vllm, **asked, **lists, return_finish_reason=True)
        assert (status, answer["finish_reason"], answer["text_output"]) == (
            *(200, "stop"),
            QUESTION.question,
        )
    status, answer = generate(vllm, **asked, logit_bias=[1])
    assert status == 400


def logprobs_of_one() -> dict[str, Any]:
    values = json.dumps({"temperature": 0, "logprobs": 0, "max_tokens": 1})
    return {
        "text_input": QUESTION.question,
        "sampling_parameters": values,
        "return_logprobs": True,
    }


# --- loading and health -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "demo", "enforce_eagr": True}, "did you mean enforce_eager?"),
        (
            {"model": "demo", "data_parallel_size_local": 2},
            "option data_parallel_size_local can only be 1",
        ),
        ({"model": "no/such/folder"}, "model folder 'no/such/folder' does not exist"),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(vllm, options, message):
    name = "broken_" + str(abs(hash(message)))
    add_model(vllm.repository, name, options)
    status, text = vllm.load(name)
    assert status == 400
    assert message in text
    assert generate(vllm, text_input="Tell me")[0] == 200


UNHEALTHY = "Model is unavailable due to unhealthy vLLM engine"


def kill_engine(server: Server, model: str) -> None:
    """End a model's engine, and have the first request after it refused."""
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        if f"--server {server.running.pid}-" in words and f"/{model}-1-" in words:
            process.kill()
    deadline = time.monotonic() + 60
    while True:
        (answer,) = server.infer(model=model, text_input="Tell me")
        # A request that came before the end was noticed is told of it in our own words.
        if answer.error is not None and "engine_dead" not in answer.error.message():
            break
        assert time.monotonic() < deadline
    assert answer.error.message() == UNHEALTHY


def test_a_dead_engine_unloads_its_model_and_the_next_load_has_the_present_options(vllm):
    # Nothing brings its engine back.
    options = {"model": "demo", "max_model_len": 64, "engine_restart_timeout_s": 0}
    file = add_model(
        vllm.repository, "mortal", options, parameter("ENABLE_VLLM_HEALTH_CHECK", "true")
    )
    assert vllm.load("mortal")[0] == 200
    assert vllm.infer(model="mortal", text_input="Tell me")[0].error is None
    kill_engine(vllm, "mortal")
    (answer,) = vllm.infer(model="mortal", text_input="Tell me")
    assert answer.error.message() == (
        "Request for unknown model: 'mortal' has no available versions"
    )
    assert vllm.request("/v2/models/mortal/ready")[0] == 400
    assert vllm.log().count("[vllm] Engine is not healthy and model will be unloaded") == 1
    file.write_text(json.dumps({"model": "demo", "max_model_len": 32}))
    assert vllm.load("mortal")[0] == 200
    (answer,) = vllm.infer(model="mortal", text_input="word " * 40)
    assert "max_model_len (32)" in answer.error.message()


def test_a_server_without_model_control_and_metrics_outlives_an_engine(tmp_path):
    more = [
        parameter("ENABLE_VLLM_HEALTH_CHECK", "true"),
        parameter("REPORT_CUSTOM_METRICS", "true"),
    ]
    options = {"model": "demo", "engine_restart_timeout_s": 0}
    add_model(tmp_path / "models", MODEL, options, *more)
    with serving(tmp_path / "models", tmp_path / "log", "--allow-metrics=false") as server:
        assert server.infer(text_input="Tell me")[0].error is None
        kill_engine(server, MODEL)
        (answer,) = server.infer(text_input="Tell me")
        assert answer.error.message() == UNHEALTHY
        assert server.log().count("without explicit model control the model stays") == 1

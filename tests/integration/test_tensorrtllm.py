"""Clients of tensorrtllm_backend against the models with its names and tensors."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from demo_server import MAX_NUM_SEQS, MODEL, Server
from integration.generating import generate, generate_stream, post
from paged_client import Client
from pipelines import write_part_of_pipeline
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from paged_backend import LLM, BeamSearchParams
from paged_backend.launch.server_process import start_server
from paged_backend.tools.demo import load_questions
from paged_backend.values.outputs import BeamSearchOutput

pytestmark = pytest.mark.server
QUESTIONS = load_questions()
GREEDY = {"temperature": 0, "max_tokens": 64}
MAX_QUEUE_SIZE = 3
THERE = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The models as each option makes them: decoupled, not decoupled, and without a batch."""
    repository = tmp_path_factory.mktemp("pipeline")
    options = {
        **{"model": "demo", "max_num_seqs": MAX_NUM_SEQS, "max_queue_size": MAX_QUEUE_SIZE},
        "speculative_config": {"method": "suffix"},
    }
    write_part_of_pipeline(repository, MODEL, options, THERE)
    for copy, name, line, other in (
        ("once", "ensemble", "decoupled: true", "decoupled: false"),
        ("once_ids", "tensorrt_llm", "decoupled: true", "decoupled: false"),
        ("llmapi", "tensorrt_llm", "max_batch_size: 64", "max_batch_size: 0"),
    ):
        config = shutil.copytree(repository / name, repository / copy) / "config.pbtxt"
        assert line in config.read_text()
        config.write_text(config.read_text().replace(line, other))
    for copy, name, inputs in (
        ("loose", "ensemble", {"text_input": "STRING", "max_tokens": "INT32"}),
        ("loose_before", "preprocessing", {"QUERY": "STRING", "REQUEST_OUTPUT_LEN": "INT32"}),
        ("loose_after", "postprocessing", {"TOKENS_BATCH": "INT32", "SEQUENCE_LENGTH": "INT32"}),
    ):
        config = shutil.copytree(repository / name, repository / copy) / "config.pbtxt"
        source = config.read_text().replace("decoupled: true", "decoupled: false")
        for tensor, kind in inputs.items():
            dims = "[-1, -1]" if tensor == "TOKENS_BATCH" else "[-1]"
            fields = f'name: "{tensor}" data_type: TYPE_{kind} dims: {dims} optional: true'
            source += f"\ninput {{ {fields} }}"
        config.write_text(source)
    with start_server(repository) as running:
        yield Server(running)


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.running.grpc_url, timeout=60) as client:
        yield client


def tensors_of(inputs: dict[str, Any]) -> list[InferInput]:
    """Tensors of a batch: what is no array is the only element of the only row."""
    tensors = []
    for name, value in inputs.items():
        array = value if np.ndim(value) > 1 else np.array([np.atleast_1d(value)])
        if array.dtype.kind in "US":
            array = array.astype(object)
        if array.dtype == np.int64:
            array = array.astype(np.int32)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        tensors.append(InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
        tensors[-1].set_data_from_numpy(array)
    return tensors


class Stream:
    """A decoupled request as tensorrtllm_backend's clients send it."""

    def __init__(self, server: Server, model: str, inputs: dict[str, Any], request_id: str = ""):
        self.results: list[Any] = []
        self._begun, self._ended = threading.Event(), threading.Event()
        self._client = InferenceServerClient(server.running.grpc_url)
        self._client.start_stream(self._take)
        self.send(model, inputs, request_id)

    def send(self, model: str, inputs: dict[str, Any], request_id: str) -> None:
        self._client.async_stream_infer(
            model, tensors_of(inputs), request_id=request_id, enable_empty_final_response=True
        )

    def _take(self, result: Any, error: Any) -> None:
        self.results.append(error or result)
        self._begun.set()
        if error or result.get_response().parameters["triton_final_response"].bool_param:
            self._ended.set()

    def cancel(self) -> None:
        """Wait for the first response, and cancel the request."""
        assert self._begun.wait(30)
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    def end(self) -> list[Any]:
        """Wait for the last response; returns those with tensors."""
        assert self._ended.wait(30)
        self._client.stop_stream()
        self._client.close()
        for result in self.results:
            if isinstance(result, Exception):
                raise result
        return [result for result in self.results if result.get_response().outputs]


def stream(server: Server, model: str, outputs: list[str], **inputs: Any) -> list[dict[str, Any]]:
    """The outputs of each response."""
    results = Stream(server, model, inputs).end()
    return [{name: result.as_numpy(name) for name in outputs} for result in results]


def infer(server: Server, model: str, request_id: str = "", **inputs: Any) -> Any:
    """The only response of a model that is not decoupled."""
    with InferenceServerClient(server.running.grpc_url) as grpc:
        return grpc.infer(model, tensors_of(inputs), request_id=request_id)


def text(value: str) -> Any:
    return np.array([value.encode()], dtype=np.object_)


def texts(*values: str) -> Any:
    """A column of a batch."""
    return np.array([[value.encode()] for value in values], dtype=np.object_)


def column(value: Any, rows: int) -> Any:
    return np.array([[value]] * rows)


# --- ensemble: text in, text out ----------------------------------------------------------------


def test_a_client_gets_its_shapes(server: Server, client: Client) -> None:
    question = QUESTIONS[4].question  # whose answer is too short to be sent in one piece
    direct = client.generate(question, **GREEDY, logprobs=0)
    asked = ["text_output", "cum_log_probs", "output_log_probs", "sequence_length"]
    wishes = {
        "text_input": text(question),
        "max_tokens": np.int32(64),
        "stream": False,
        "beam_width": np.int32(1),
        "temperature": np.float32(1.0),
        "exclude_input_in_output": True,
        "return_log_probs": True,
        "return_num_input_tokens": True,
    }
    (answer,) = stream(server, "ensemble", [*asked, "num_input_tokens", "batch_index"], **wishes)
    assert answer["text_output"].tolist() == [direct.text.encode()]
    assert answer["sequence_length"].tolist() == [[direct.num_output_tokens]]
    assert answer["num_input_tokens"].tolist() == [[direct.num_input_tokens]]
    assert answer["batch_index"].tolist() == [[0]]
    assert direct.answers[0].logprobs is not None
    logprobs = [position[0].logprob for position in direct.answers[0].logprobs]
    np.testing.assert_allclose(answer["output_log_probs"], [[logprobs]], rtol=1e-5)
    np.testing.assert_allclose(answer["cum_log_probs"], [[sum(logprobs)]], rtol=1e-5)

    pieces = stream(server, "ensemble", asked, **wishes | {"stream": True})
    assert len(pieces) > 1
    assert b"".join(piece["text_output"][0] for piece in pieces).decode() == direct.text
    together = np.concatenate([piece["output_log_probs"] for piece in pieces], axis=2)
    np.testing.assert_allclose(together, [[logprobs]], rtol=1e-5)
    np.testing.assert_allclose(pieces[-1]["cum_log_probs"], [[sum(logprobs)]], rtol=1e-5)


@pytest.mark.parametrize("is_stream", [False, True])
def test_logits_of_the_prompt_and_of_the_answer(
    server: Server, client: Client, is_stream: bool
) -> None:
    direct = client.generate("What does len do?", **GREEDY, logprobs=0, prompt_logprobs=0)
    wishes = {
        "text_input": text("What does len do?"),
        "max_tokens": np.int32(64),
        "stream": is_stream,
        "return_log_probs": True,
        "return_context_logits": True,
        "return_generation_logits": True,
    }
    asked = ["output_log_probs", "context_logits", "generation_logits"]
    answers = stream(server, "ensemble", asked, **wishes)
    assert (len(answers) > 1) == is_stream
    context = answers[0]["context_logits"]
    assert all(answer["context_logits"].size == 0 for answer in answers[1:])
    generation = np.concatenate([answer["generation_logits"] for answer in answers], axis=2)
    vocab_size = context.shape[-1]
    assert context.shape == (1, direct.num_input_tokens, vocab_size)
    assert generation.shape == (1, 1, direct.num_output_tokens, vocab_size)
    np.testing.assert_array_equal(context[0, -1], generation[0, 0, 0])
    prompt = np.array([position[0].token_id for position in direct.prompt_logprobs[1:]])
    given = [position[0].logprob for position in direct.prompt_logprobs[1:]]
    np.testing.assert_allclose(logprobs_of(context[0, :-1], prompt), given, atol=1e-4)
    answer = np.array(direct.answers[0].token_ids)
    given = np.concatenate([answer["output_log_probs"][0, 0] for answer in answers])
    np.testing.assert_allclose(logprobs_of(generation[0, 0], answer), given, atol=1e-4)


def logprobs_of(logits: Any, tokens: Any) -> Any:
    totals = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    return logits[np.arange(len(tokens)), tokens] - totals


@pytest.mark.parametrize("is_stream", [False, True])
def test_each_sequence_has_responses_of_its_own(
    server: Server, client: Client, is_stream: bool
) -> None:
    # Five tokens of each: too few to be sent in one piece.
    direct = client.generate("What does", n=3, seed=5, max_tokens=5, top_k=50)
    wishes = {"num_return_sequences": np.int32(3), "seed": np.uint64(5), "top_k": np.int32(50)}
    answers = stream(
        server,
        "ensemble",
        ["text_output", "sequence_index"],
        text_input=text("What does"),
        max_tokens=np.int32(5),
        exclude_input_in_output=True,
        stream=is_stream,
        **wishes,
    )
    texts = [b"", b"", b""]
    for answer in answers:
        texts[answer["sequence_index"].item()] += answer["text_output"][0]
    assert [found.decode() for found in texts] == [answer.text for answer in direct.answers]
    assert (len(answers) > 3) == is_stream


def test_older_names_mean_the_same(server: Server) -> None:
    call = {"text_input": "What does", "max_tokens": 12, "top_k": 50, "temperature": 5.0}
    newer = {"seed": 7, "min_tokens": 12, "return_log_probs": True, "return_perf_metrics": True}
    older = {
        **{"random_seed": 7, "min_length": 12, "is_return_log_probs": True},
        "return_kv_cache_reuse_stats": True,
    }
    expected = generate(server, "ensemble", **call, **newer)
    found = generate(server, "ensemble", **call, **older)
    times = {name for name in expected if name.endswith("_ns")}
    assert found.keys() == expected.keys()
    assert len(expected["output_log_probs"]) == 12
    assert times
    # They depend on earlier requests.
    others = {"kv_cache_reused_blocks", "kv_cache_alloc_new_blocks", "acceptance_rate"}
    others |= {"total_draft_tokens", "total_accepted_draft_tokens"}
    for name in expected.keys() - times - others:
        assert found[name] == expected[name], name
    neutral = {
        **{"early_stopping": True, "no_repeat_ngram_size": 0, "beam_search_diversity_rate": 0.0},
        **{"beam_width": 1, "length_penalty": 1.0},
    }
    again = generate(server, "ensemble", **call, **older, **neutral)
    assert again["text_output"] == expected["text_output"]
    generate(server, "ensemble", **call, no_repeat_ngram_size=2**30)
    ids = {"input_ids": np.array([[5, 6, 7]], np.int32), "request_output_len": np.int32(4)}
    ids |= {"runtime_top_k": np.int32(50), "random_seed": np.uint64(7)}
    (one,), (other,) = (
        stream(server, "tensorrt_llm", ["output_ids"], **ids, min_length=np.int32(length))
        for length in (0, 4)
    )
    assert one["output_ids"].shape == other["output_ids"].shape == (1, 1, 7)


def test_words_and_ids(server: Server, client: Client) -> None:
    question, answer = QUESTIONS[6].question, QUESTIONS[6].answer
    words = answer.split()
    call = {"text_input": question, "max_tokens": 64}
    plain = generate(server, "ensemble", **call, bad_words="", stop_words="")
    assert plain["text_output"] == question + "\n" + answer
    alone = call | {"exclude_input_in_output": True}
    stopped = generate(server, "ensemble", **alone, stop_words=["never there", words[2]])
    assert stopped["text_output"] == "\n" + answer[: answer.index(words[2])]
    events = generate_stream(server, "ensemble", **call, stop_words=words[2])
    assert "".join(event["text_output"] for event in events) == stopped["text_output"]
    assert (
        words[0] not in generate(server, "ensemble", **alone, bad_words=[words[0]])["text_output"]
    )
    bias = {"embedding_bias_words": [words[0]], "embedding_bias_weights": [-100.0]}
    assert words[0] not in generate(server, "ensemble", **alone, **bias)["text_output"]
    token_ids = client.generate(question, **GREEDY).token_ids
    ended = generate(server, "ensemble", **alone, end_id=token_ids[3], pad_id=0)
    assert ended["sequence_length"] == 4
    endless = generate(server, "ensemble", **alone | {"max_tokens": 100}, end_id=-1)
    assert endless["sequence_length"] == 100


@pytest.mark.parametrize("is_stream", [False, True])
def test_words_with_special_tokens(server: Server, is_stream: bool) -> None:
    """A word that is a special token, one that ends with it, and one that the answer has not."""
    question, answer = QUESTIONS[6].question, QUESTIONS[6].answer
    call = {"text_input": question, "max_tokens": 80, "end_id": -1}
    call["exclude_input_in_output"] = True

    def ask(**words: str) -> str:
        if is_stream:
            parts = generate_stream(server, "ensemble", **call, **words)
            return "".join(part["text_output"] for part in parts)
        return str(generate(server, "ensemble", **call, **words)["text_output"])

    endless = ask()
    assert len(endless) > len("\n" + answer)
    assert ask(stop_words="<|end|>") == "\n" + answer
    assert ask(stop_words=f"{answer[-5:]}<|end|>") == "\n" + answer[:-5]
    assert ask(stop_words="never<|end|>") == endless
    assert ask(bad_words="<|end|>") != endless


def test_guides_constrain_the_answer(server: Server) -> None:
    """The first request is the one in tensorrtllm_backend's documentation, with another text."""
    documented = {"max_tokens": 20, "bad_words": "", "stop_words": "", "pad_id": 2, "end_id": 2}
    request = {"text_input": "Describe len.", "exclude_input_in_output": True, **documented}
    answer = generate(server, "ensemble", **request, guided_decoding_guide_type="json")
    assert answer["text_output"].startswith("{")
    for kind, guide, pattern in [
        ("json_schema", '{"enum": ["yes", "no"]}', '"(yes|no)"'),
        ("regex", "[0-9]{3}", "[0-9]{3}"),
        ("ebnf_grammar", "root ::= [0-9] [a-f]", "[0-9][a-f]"),
    ]:
        guided = {"guided_decoding_guide_type": kind, "guided_decoding_guide": guide}
        answer = generate(server, "ensemble", **request, **guided)
        assert re.fullmatch(pattern, answer["text_output"]), (kind, answer)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 9}, "beam_width: must be at most max_"),
        ({"beam_width": 2, "return_context_logits": True}, "return_context_logits: must be false"),
        ({"length_penalty": 0.5}, "length_penalty: must be 1 without beam search"),
        ({"lora_task_id": 7}, "LoRA feature is not enabled."),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size: must be 0"),
        (
            {"seed": 1, "random_seed": 1},
            "random_seed: is the older name of seed; give one of them",
        ),
        ({"min_length": 5}, "min_length: must be at most max_tokens"),
        ({"unknown": 1}, "unknown: is not known"),
        ({"guided_decoding_guide": "x"}, "guided_decoding_guide_type: is missing"),
        (
            {"guided_decoding_guide_type": "yaml"},
            "guided_decoding_guide_type: must be one of json, json_schema, regex, ebnf_grammar",
        ),
        (
            {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "("},
            "guided_decoding_guide: ",
        ),
        ({"num_return_sequences": 0}, "num_return_sequences: must be an integer from 1"),
        ({"stop_words": "x" * 300}, "stop_words: each has at most 256 characters"),
        ({"end_id": 10**6}, "end_id: must be below"),
        ({"embedding_bias_words": ["a"]}, "embedding_bias_weights: is missing"),
        (
            {"embedding_bias_words": ["a"], "embedding_bias_weights": [1.0, 2.0]},
            "embedding_bias_weights: has 2 elements for 1 words",
        ),
        (
            {"embedding_bias_words": ["a"], "embedding_bias_weights": [1e6]},
            "embedding_bias_weights: each must be",
        ),
        ({"max_tokens": 0}, "max_tokens: must be an integer from 1"),
        ({"max_tokens": 10**6}, "max_tokens: must be at most max_model_len"),
        ({"text_input": ""}, "prompt: is empty"),
    ],
)
def test_what_a_client_cannot_have_is_refused_by_its_name(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    call = {"text_input": "x", "max_tokens": 4, **fields}
    status, body = post(server, "ensemble", "generate", call)
    assert (status, message in body) == (400, True), body
    neutral = {"beam_width": 1, "length_penalty": 1.0, "lora_task_id": 0, "use_draft_logits": False}
    generate(server, "ensemble", text_input="x", max_tokens=4, **neutral)


@pytest.mark.parametrize("is_stream", [False, True])
def test_each_row_of_a_batch_is_a_request_of_its_own(server: Server, is_stream: bool) -> None:
    asked = QUESTIONS[:5]
    answers = stream(
        server,
        "ensemble",
        ["text_output", "batch_index"],
        text_input=texts(*(question.question for question in asked)),
        max_tokens=column(64, 5),
        stream=column(is_stream, 5),
        exclude_input_in_output=column(True, 5),
        temperature=np.array([[1.0], [0.5], [2.0], [1.0], [1.0]]),
    )
    rows = [answer["batch_index"].item() for answer in answers]
    found = [""] * 5
    for row, answer in zip(rows, answers, strict=True):
        found[row] += answer["text_output"][0].decode()
    assert found == ["\n" + question.answer for question in asked]
    assert is_stream or rows == [0, 1, 2, 3, 4]


def test_a_bad_row_fails_its_batch_and_ends_the_others(server: Server) -> None:
    with pytest.raises(InferenceServerException, match="max_tokens: must be an integer from 1"):
        stream(
            server,
            "ensemble",
            [],
            text_input=texts("a", "b"),
            max_tokens=np.array([[1500], [0]]),
            end_id=column(-1, 2),
        )
    server.wait_for("num_requests_running", 0)
    with pytest.raises(InferenceServerException, match="stream: must be the same in all rows"):
        stream(
            server,
            "ensemble",
            [],
            text_input=texts("a", "b"),
            max_tokens=column(4, 2),
            stream=np.array([[True], [False]]),
        )


def test_a_model_that_is_not_decoupled_answers_all_rows_at_once(server: Server) -> None:
    asked = QUESTIONS[:3]
    result = infer(
        server,
        "once",
        text_input=texts(*(question.question for question in asked)),
        max_tokens=column(64, 3),
        return_log_probs=column(True, 3),
    )
    wanted = [f"{question.question}\n{question.answer}".encode() for question in asked]
    assert result.as_numpy("text_output").tolist() == wanted
    assert result.as_numpy("batch_index").tolist() == [[0], [1], [2]]
    lengths = result.as_numpy("sequence_length")
    logprobs = result.as_numpy("output_log_probs")
    assert logprobs.shape == (3, 1, lengths.max())
    for row, length in enumerate(lengths[:, 0]):
        total = logprobs[row, 0, :length].sum()
        np.testing.assert_allclose(result.as_numpy("cum_log_probs")[row], [total], rtol=1e-5)
        assert not logprobs[row, 0, length:].any()


def test_a_model_that_is_not_decoupled_serves_infer_over_http(server: Server) -> None:
    inputs = [
        {"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["What does len do?"]},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [64]},
    ]
    status, body = post(server, "once", "infer", {"inputs": inputs})
    assert status == 200, body
    outputs = {output["name"]: output["data"] for output in json.loads(body)["outputs"]}
    wanted = "What does len do?\nReturn the number of items in a container."
    assert outputs["text_output"] == [wanted]
    inputs.append({"name": "stream", "shape": [1, 1], "datatype": "BOOL", "data": [True]})
    status, body = post(server, "once", "infer", {"inputs": inputs})
    assert status == 400
    assert "stream: cannot be true: the model's policy is not decoupled" in body


def test_a_full_queue_has_the_words_that_its_clients_look_for(server: Server) -> None:
    """It is refused before any work, and so is a request over gRPC, with its status."""
    with server.full(), ThreadPoolExecutor(MAX_QUEUE_SIZE) as pool:
        ask = partial(infer, server, "once", text_input=text("x"), max_tokens=4)
        waiting = [pool.submit(ask) for _ in range(MAX_QUEUE_SIZE)]
        server.wait_for("num_requests_waiting", MAX_QUEUE_SIZE)
        with pytest.raises(InferenceServerException, match="Exceeds maximum queue size") as refused:
            ask()
        assert "Maximum queue size of " in refused.value.message()
        assert refused.value.status() == "StatusCode.UNAVAILABLE"
        server.post("generate", {"task": "cancel", "call_id": "one-of-many"})
        assert all(call.result() for call in waiting)


METRICS = (
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks", "kv_cache_alloc_total_blocks"),
    *("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns"),
    *("acceptance_rate", "total_accepted_draft_tokens", "total_draft_tokens"),
)


@pytest.mark.parametrize("is_stream", [False, True])
def test_metrics_of_a_request(server: Server, is_stream: bool) -> None:
    before = time.monotonic_ns()
    *_, last = stream(
        server,
        "ensemble",
        list(METRICS),
        text_input=text("What does textwrap.dedent do? " * 12 + str(is_stream)),
        max_tokens=20,
        end_id=-1,
        stream=is_stream,
        return_perf_metrics=True,
    )
    found = {name: array.item() for name, array in last.items()}
    moments = [before, *(found[name] for name in METRICS[3:7]), time.monotonic_ns()]
    assert moments == sorted(moments)
    new, reused, total = (found[name] for name in METRICS[:3])
    assert new + reused == total >= 5
    drafts, accepted = found["total_draft_tokens"], found["total_accepted_draft_tokens"]
    assert 0 <= accepted <= drafts
    assert found["acceptance_rate"] == np.float32(accepted / max(1, drafts))


def test_the_drafts_of_requests_are_those_of_the_server(server: Server) -> None:
    names = ("total_draft_tokens", "total_accepted_draft_tokens")
    metrics = [f"spec_decode_num_{name}_tokens_total" for name in ("draft", "accepted")]
    server.wait_for("num_requests_running", 0)
    time.sleep(1.5)  # the metrics of earlier requests are there
    before = server.metrics()
    total = np.zeros(2, int)
    for _ in range(5):  # the answer to the first one is a source of guesses for the others
        call = {"text_input": "Count: one two three. Count: one two", "max_tokens": 60}
        last = generate(server, "ensemble", **call, end_id=-1, return_perf_metrics=True)
        total += [last[name] for name in names]
    for name, number in zip(metrics, total.tolist(), strict=True):
        server.wait_for(name, before[name] + number)
    assert total[0] >= total[1] > 0


# --- tensorrt_llm: token ids in, token ids out --------------------------------------------------


def test_token_ids_of_a_batch(server: Server, client: Client) -> None:
    asked = [QUESTIONS[4].question, QUESTIONS[8].question]
    direct = [client.generate(question, **GREEDY) for question in asked]
    prompts = [list(client.tokenize(question)) for question in asked]
    longest = max(map(len, prompts))
    request = {
        "input_ids": np.array([ids + [0] * (longest - len(ids)) for ids in prompts]),
        "input_lengths": np.array([[len(ids)] for ids in prompts]),
        "request_output_len": column(64, 2),
    }
    answers = stream(server, "tensorrt_llm", ["output_ids", "sequence_length"], **request)
    for answer, prompt, wanted in zip(answers, prompts, direct, strict=True):
        assert answer["output_ids"].tolist() == [[prompt + list(wanted.token_ids)]]
        assert answer["sequence_length"].item() == len(prompt) + len(wanted.token_ids)

    excluded = request | {"exclude_input_in_output": column(True, 2)}
    result = infer(server, "once_ids", **excluded)
    lengths = result.as_numpy("sequence_length")[:, 0]
    for row, length in enumerate(lengths):
        found = result.as_numpy("output_ids")[row, 0, :length]
        assert found.tolist() == list(direct[row].token_ids)

    streamed: list[list[int]] = [[], []]
    names = ["output_ids", "batch_index"]
    for part in stream(server, "tensorrt_llm", names, **request, streaming=column(True, 2)):
        streamed[part["batch_index"].item()] += part["output_ids"][0, 0].tolist()
    assert streamed == [list(answer.token_ids) for answer in direct]


def test_words_and_biases_as_token_ids(server: Server, client: Client) -> None:
    question, answer = QUESTIONS[6].question, QUESTIONS[6].answer
    direct = list(client.generate(question, **GREEDY).token_ids)
    ids = client.tokenize(question)
    request = {
        "input_ids": np.array([ids]),
        "request_output_len": 64,
        "exclude_input_in_output": True,
    }

    def ask(**more: Any) -> list[int]:
        result = infer(server, "once_ids", **request, **more)
        found: list[int] = result.as_numpy("output_ids")[0, 0].tolist()
        return found

    assert ask() == direct
    assert ask(end_id=1) == direct  # the tokenizer's own token
    assert ask(end_id=direct[3]) == direct[:4]
    assert len(ask(end_id=-1)) == 64
    stop = direct[2]
    assert ask(stop_words_list=np.array([[[stop], [1]]])) == direct[:3]
    word = {"stop_words": texts(QUESTIONS[6].answer.split()[0])}
    assert len(ask(**word)) < 8
    for place in (0, 8):  # whichever comes first, the word or the token
        both = ask(stop_words_list=np.array([[[direct[place]], [1]]]), **word)
        assert len(both) == min(place + 1, len(ask(**word)))
    pair = direct[4:6]
    assert ask(stop_words_list=np.array([[pair, [2, -1]]])) == direct[:6]
    last = direct[-2:]  # with the special token, which the text leaves out
    assert ask(end_id=-1, stop_words_list=np.array([[last, [2, -1]]])) == direct
    assert ask(end_id=-1, stop_words_list=np.array([[[*last[:1], 0], [2, -1]]])) != direct
    assert direct[1] not in ask(bad_words_list=np.array([[direct[1:2], [1]]]))
    bias = np.zeros((1, 2048), np.float32)
    bias[0, direct[1]] = -100
    assert direct[1] not in ask(embedding_bias=bias)
    assert "\n" + answer == client.detokenize(direct).removesuffix("<|end|>")


def test_the_steps_one_by_one_are_the_ensemble(server: Server) -> None:
    """As in tensorrtllm_backend's end_to_end_test.py."""
    question = QUESTIONS[5].question
    words = {"BAD_WORDS_DICT": texts("Join"), "STOP_WORDS_DICT": texts("")}
    bias = {"EMBEDDING_BIAS_WORDS": texts("the"), "EMBEDDING_BIAS_WEIGHTS": np.array([[-0.5]])}
    prepared = infer(
        server, "preprocessing", QUERY=text(question), REQUEST_OUTPUT_LEN=64, **words, **bias
    )
    passed = {
        "input_ids": "INPUT_ID",
        "input_lengths": "REQUEST_INPUT_LEN",
        "decoder_input_ids": "DECODER_INPUT_ID",
        "decoder_input_lengths": "REQUEST_DECODER_INPUT_LEN",
        "request_output_len": "REQUEST_OUTPUT_LEN",
        "end_id": "OUT_END_ID",
        "pad_id": "OUT_PAD_ID",
        "bad_words_list": "BAD_WORDS_IDS",
        "stop_words_list": "STOP_WORDS_IDS",
        "embedding_bias": "EMBEDDING_BIAS",
    }
    inputs = {name: prepared.as_numpy(output) for name, output in passed.items()}
    generated = infer(server, "once_ids", **inputs)
    tokens = {
        "TOKENS_BATCH": generated.as_numpy("output_ids"),
        "SEQUENCE_LENGTH": generated.as_numpy("sequence_length"),
    }
    steps = infer(server, "postprocessing", **tokens).as_numpy("OUTPUT")
    whole = infer(
        server,
        "once",
        text_input=text(question),
        max_tokens=64,
        bad_words=texts("Join"),
        stop_words=texts(""),
        embedding_bias_words=texts("the"),
        embedding_bias_weights=np.array([[-0.5]]),
    )
    assert steps.tolist() == whole.as_numpy("text_output").tolist()


@pytest.mark.parametrize(
    ("model", "inputs", "missing"),
    [
        ("loose", {"max_tokens": 4}, "text_input"),
        ("loose", {"text_input": "x"}, "max_tokens"),
        ("loose_before", {"QUERY": "x"}, "REQUEST_OUTPUT_LEN"),
        ("loose_before", {"REQUEST_OUTPUT_LEN": 4}, "QUERY"),
        ("loose_after", {"TOKENS_BATCH": np.array([[[1]]])}, "SEQUENCE_LENGTH"),
        ("loose_after", {"SEQUENCE_LENGTH": 1}, "TOKENS_BATCH"),
        ("once_ids", {"request_output_len": 4}, "input_ids"),
    ],
)
def test_a_missing_tensor_is_named(
    server: Server, model: str, inputs: dict[str, Any], missing: str
) -> None:
    """Also where a model's configuration says that the client may leave it out."""
    given = {n: text(v) if isinstance(v, str) else v for n, v in inputs.items()}
    with pytest.raises(InferenceServerException) as caught:
        infer(server, model, **given)
    assert f"{missing}: is missing" in str(caught.value)


def test_steps_take_batches(server: Server) -> None:
    asked = [QUESTIONS[0].question, "x"]
    prepared = infer(server, "preprocessing", QUERY=texts(*asked), REQUEST_OUTPUT_LEN=column(4, 2))
    ids, lengths = prepared.as_numpy("INPUT_ID"), prepared.as_numpy("REQUEST_INPUT_LEN")
    assert ids.shape == (2, lengths.max())
    tokens = {"TOKENS_BATCH": ids[:, None], "SEQUENCE_LENGTH": lengths}
    back = infer(server, "postprocessing", **tokens).as_numpy("OUTPUT")
    assert [value.decode() for value in back] == asked


LONG_REQUEST = {
    "input_ids": np.array([[40, 41, 42]]),
    "request_output_len": 1500,
    "end_id": -1,
    "runtime_top_k": 50,
    "temperature": 5.0,
    "random_seed": np.uint64(7),
}
"""It takes seconds, as its text does not repeat itself. Otherwise speculation ends it soon."""


@pytest.mark.parametrize("by", ["request id", "cancellation"])
def test_a_request_can_be_stopped(server: Server, by: str) -> None:
    request = {**LONG_REQUEST, "streaming": True}
    with server.aborting(1):
        running = Stream(server, "tensorrt_llm", request, request_id="7")
        if by == "cancellation":
            running.cancel()
            return
        server.wait_for("num_requests_running", 1)
        # The clients send the other inputs with it.
        stop = {"input_ids": [[0]], "input_lengths": 0, "request_output_len": 0, "stop": True}
        running.send("tensorrt_llm", {n: np.array(v) for n, v in stop.items()}, "7")
        parts = running.end()
        assert 0 < sum(part.as_numpy("sequence_length").item() for part in parts) < 1500


def test_a_request_of_a_model_that_is_not_decoupled_can_be_stopped(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(infer, server, "once_ids", "8", **LONG_REQUEST)
        server.wait_for("num_requests_running", 1)
        stopping = infer(server, "once_ids", "8", stop=True)
        assert not stopping.get_response().outputs
        assert running.result(30).as_numpy("sequence_length").item() < 1500
    with pytest.raises(InferenceServerException, match="stop: .* request id"):
        infer(server, "once_ids", stop=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input_ids": None}, "input_ids: is missing"),
        ({"input_lengths": 9}, "input_lengths: must be from 1 to 3, got 9"),
        ({"request_output_len": 0}, "request_output_len: must be an integer from 1"),
        ({"input_ids": np.array([[5000]])}, "token ids must be from 0 to 2047, got 5000"),
        ({"runtime_top_p": 1.5}, "runtime_top_p: must be"),
        ({"runtime_top_p_decay": 0.5}, "runtime_top_p_decay: must be 1"),
        ({"draft_input_ids": np.array([[1, 2]])}, "draft_input_ids: is not supported"),
        ({"decoder_input_ids": np.array([[1, 2]])}, "decoder_input_ids: is not supported"),
        ({"lookahead_window_size": 3}, "lookahead_window_size: is not supported"),
        ({"max_tokens": 4}, "max_tokens: can only be used with text_input"),
        ({"sampling_param_top_k": 4}, "sampling_param_top_k: can only be used with text_input"),
        ({"text_input": text("x")}, "input_ids: can only be used with token ids"),
        ({"retention_decode_priority": 90}, "retention_decode_priority: is not supported"),
        ({"stop_words_list": np.array([[[1, 2], [3, -1]]])}, "stop_words_list: each end must be"),
        ({"stop_words_list": np.array([[[9999], [1]]])}, "stop_words_list: must be from 0 to 2047"),
        ({"bad_words_list": np.array([[[9999], [1]]])}, "bad_words_list: must be below 2048"),
    ],
)
def test_a_wrong_field_of_token_ids_is_named(
    server: Server, fields: dict[str, Any], message: str
) -> None:
    request: dict[str, Any] = {"input_ids": np.array([[40, 41, 42]]), "request_output_len": 4}
    request = {name: value for name, value in (request | fields).items() if value is not None}
    with pytest.raises(InferenceServerException, match=message) as refused:
        infer(server, "once_ids", **request)
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


# --- the LLM API --------------------------------------------------------------------------------


def test_names_of_the_llm_api(server: Server, client: Client) -> None:
    question, answer = QUESTIONS[4].question, QUESTIONS[4].answer
    for model in ("tensorrt_llm", "llmapi"):
        found = generate(server, model, text_input=question, sampling_param_max_tokens=64)
        assert found["text_output"] == "\n" + answer
        found = generate(
            server,
            model,
            text_input=question,
            sampling_param_max_tokens=64,
            sampling_param_stop=[answer.split()[2]],
            sampling_param_exclude_input_from_output=False,
            sampling_param_return_perf_metrics=True,
            return_finish_reason=True,
            return_stop_reason=True,
            return_cumulative_logprob=True,
        )
        assert question in found["text_output"]
        assert (found["finish_reason"], found["stop_reason"]) == ("stop", answer.split()[2])
        assert found["cumulative_logprob"] <= 0 < found["last_token_time_ns"]
        status, body = post(
            server, model, "generate", {"text_input": "x", "sampling_param_max_tokens": 0}
        )
        assert (status, "sampling_param_max_tokens: must be" in body) == (400, True), body
        twice = {"text_input": "x", "sampling_param_max_tokens": 4, "max_tokens": 4}
        status, body = post(server, model, "generate", twice)
        assert (status, "is max_tokens in the LLM API" in body) == (400, True), body
        status, body = post(
            server, model, "generate", {"text_input": "x", "sampling_param_best_of": 2}
        )
        assert (status, "best_of: must be 1" in body) == (400, True), body
    with InferenceServerClient(server.running.grpc_url) as grpc:
        shown = grpc.get_model_metadata("llmapi").inputs
    assert {tuple(spec.shape) for spec in shown if spec.name == "text_input"} == {(1,)}


def test_steps_bound_a_request_and_answer_large_ones_beside_the_others(server: Server) -> None:
    """16 texts of 450 characters, and one of 4,194,305, which would take seconds."""
    asked = ["What does len do? " * 25 + str(row) for row in range(16)]
    prepared = infer(server, "preprocessing", QUERY=texts(*asked), REQUEST_OUTPUT_LEN=column(4, 16))
    ids, lengths = prepared.as_numpy("INPUT_ID"), prepared.as_numpy("REQUEST_INPUT_LEN")
    assert ids.size > 2048  # otherwise it is answered at once
    tokens = {"TOKENS_BATCH": ids[:, None], "SEQUENCE_LENGTH": lengths}
    back = infer(server, "postprocessing", **tokens).as_numpy("OUTPUT")
    assert [value.decode() for value in back] == asked
    long = np.zeros((1, 1, 2_000_000), np.int32)
    with pytest.raises(InferenceServerException, match="TOKENS_BATCH: each has at most .* tokens"):
        infer(server, "postprocessing", TOKENS_BATCH=long, SEQUENCE_LENGTH=1)
    with pytest.raises(InferenceServerException, match="QUERY: all rows have at most .* character"):
        infer(server, "preprocessing", QUERY=text("a" * (2**22 + 1)), REQUEST_OUTPUT_LEN=4)


# --- beams --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def searched() -> tuple[BeamSearchOutput, ...]:
    """What an `LLM` finds with the fields of `BEAMS`, for two questions."""
    llm = LLM("demo")
    params = BeamSearchParams(3, 24, length_penalty=0.5, early_stopping=True)
    return tuple(llm.beam_search([question.question for question in QUESTIONS[:2]], params))


BEAMS = {"beam_width": 3, "early_stopping": True, "return_log_probs": True}
BEAM_OUTPUTS = ("sequence_length", "cum_log_probs", "output_log_probs", "sequence_index")


def test_beams_of_a_batch_as_token_ids(
    server: Server, client: Client, searched: tuple[BeamSearchOutput, ...]
) -> None:
    prompts = [list(client.tokenize(question.question)) for question in QUESTIONS[:2]]
    longest = max(map(len, prompts))
    request = {
        "input_ids": np.array([ids + [0] * (longest - len(ids)) for ids in prompts]),
        "input_lengths": np.array([[len(ids)] for ids in prompts]),
        "request_output_len": column(24, 2),
        "len_penalty": column(0.5, 2),
        "pad_id": column(7, 2),
        # What tensorrtllm_backend's clients send with each request.
        **{"temperature": column(1.0, 2), "runtime_top_k": column(1, 2)},
        **{"runtime_top_p": column(0.0, 2), "seed": np.array([[9], [9]], np.uint64)},
        **{name: column(value, 2) for name, value in BEAMS.items()},
    }
    parts = stream(server, "tensorrt_llm", ["output_ids", *BEAM_OUTPUTS], **request)
    assert len(parts) == 2
    once = infer(server, "once_ids", **request)
    for row, (part, wanted) in enumerate(zip(parts, searched, strict=True)):
        sequences = [list(sequence.tokens) for sequence in wanted.sequences]
        assert sequences[0][: len(prompts[row])] == prompts[row]
        assert part["sequence_length"].tolist() == [list(map(len, sequences))]
        assert part["sequence_index"].tolist() == [[0]]
        width = max(map(len, sequences))
        padded = [ids + [7] * (width - len(ids)) for ids in sequences]
        assert part["output_ids"].tolist() == [padded]
        scores = [sequence.cum_logprob for sequence in wanted.sequences]
        np.testing.assert_allclose(part["cum_log_probs"], [scores], rtol=1e-5)
        for beam, sequence in enumerate(wanted.sequences):
            logprobs = [entry.logprob for entry in sequence.logprobs]
            found = part["output_log_probs"][0, beam]
            np.testing.assert_allclose(found[: len(logprobs)], logprobs, rtol=1e-5)
            assert not found[len(logprobs) :].any()
            ids = once.as_numpy("output_ids")[row, beam]
            assert ids[: len(sequences[beam])].tolist() == sequences[beam]
        np.testing.assert_array_equal(
            once.as_numpy("sequence_length")[row], list(map(len, sequences))
        )
    # The last step of the pipeline makes a text of each beam.
    first = {"TOKENS_BATCH": parts[0]["output_ids"], "SEQUENCE_LENGTH": parts[0]["sequence_length"]}
    texts_of = infer(server, "postprocessing", **first).as_numpy("OUTPUT").tolist()
    asked = QUESTIONS[0].question
    assert [t.decode() for t in texts_of] == [asked + s.text for s in searched[0].sequences]


def test_beams_as_texts(server: Server, searched: tuple[BeamSearchOutput, ...]) -> None:
    question = QUESTIONS[0].question
    call = {"text_input": text(question), "max_tokens": 24, "length_penalty": 0.5, **BEAMS}
    alone = {"exclude_input_in_output": True}
    outputs = ["text_output", *BEAM_OUTPUTS]
    answers = [sequence.text.encode() for sequence in searched[0].sequences]
    lengths = [len(sequence.logprobs) for sequence in searched[0].sequences]
    (whole,) = stream(server, "ensemble", outputs, **call, **alone)
    assert whole["text_output"].tolist() == answers
    assert whole["sequence_length"].tolist() == [lengths]
    (best,) = stream(server, "ensemble", outputs, **call, **alone, num_return_sequences=1)
    assert best["text_output"].tolist() == answers[:1]
    # Each response of a stream has all of the text so far, which never changes.
    parts = stream(server, "ensemble", outputs, **call, stream=True)
    for part in parts:
        pairs = zip(answers, part["text_output"].tolist(), strict=True)
        assert all(answer.startswith(found) for answer, found in pairs)
    for name in outputs:
        np.testing.assert_array_equal(parts[-1][name], whole[name])
    rows = {"text_input": texts(question, "x"), "beam_width": column(2, 2)}
    once = infer(server, "once", **rows, max_tokens=column(3, 2))
    assert len(once.as_numpy("text_output")) == 4
    llm_api = {"text_input": question, "sampling_param_max_tokens": 24, "beam_width": 3}
    llm_api |= {"len_penalty": 0.5, "return_finish_reason": True, **alone}
    found = generate(server, "llmapi", **llm_api)
    assert [found_text.encode() for found_text in found["text_output"]] == answers
    assert len(found["finish_reason"]) == 3

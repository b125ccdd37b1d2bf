"""The client library, against messages made by hand and against a real server."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from checkpoints import make_checkpoint
from paged_client import (
    AsyncClient,
    Chunk,
    Client,
    CompletionBuilder,
    InvalidRequest,
    ModelInfo,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    TokenLogprob,
    Unavailable,
    UnknownModel,
)
from paged_client.errors import from_status
from paged_client.protocol import Prompt, StreamDecoder, stream_request
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server
from paged_backend.tools.scrape import scrape

NOBODY = "127.0.0.1:1"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
ENDLESS: dict[str, Any] = {**GREEDY, "max_tokens": 8000}
DATATYPES = {"O": "BYTES", "i": "INT32", "u": "UINT32"}


def response(**outputs: Any) -> Any:
    """A stream response as tritonserver makes it."""
    message = service_pb2.ModelStreamInferResponse()
    for name, values in outputs.items():
        array = np.asarray(values)
        text = array.dtype.kind == "U"
        if text:
            array = np.array([value.encode() for value in values], dtype=np.object_)
        datatype = DATATYPES[array.dtype.kind]
        content = serialize_byte_tensor(array).item() if text else array.tobytes()
        message.infer_response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        message.infer_response.raw_output_contents.append(content)
    return message


def answers(*parts: tuple[str, list[int], str]) -> Any:
    """A response of the model; each part is text, token ids and finish reason of one answer."""
    return response(
        text_output=[text for text, _, _ in parts],
        output_ids=np.array([token for _, ids, _ in parts for token in ids], np.int32),
        finish_reason=[reason for _, _, reason in parts],
        num_output_tokens=np.array([len(ids) for _, ids, _ in parts], np.uint32),
        num_input_tokens=np.uint32(7),
        num_cached_tokens=np.array([4], np.uint32),
    )


def test_a_text_prompt_and_its_options_become_the_contracts_tensors() -> None:
    request = stream_request("m", "né", {"max_tokens": 3, "stop": ["x"]})
    tensors = {
        tensor.name: (tensor.datatype, list(tensor.shape), content)
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
    }
    assert request.model_name == "m"
    assert tensors["text_input"] == ("BYTES", [1], b"\x03\0\0\0n\xc3\xa9")
    datatype, shape, content = tensors["sampling_parameters"]
    assert (datatype, shape) == ("BYTES", [1])
    assert deserialize_bytes_tensor(content).tolist() == [b'{"max_tokens": 3, "stop": ["x"]}']
    assert tensors["stream"] == tensors["return_output_ids"] == ("BOOL", [1], b"\x01")
    assert "input_ids" not in tensors


def test_chats_are_json_and_only_what_is_needed_is_asked_for() -> None:
    messages = [{"role": "user", "content": "h\u00e9"}]
    for prompt in (messages, {"messages": messages, "add_generation_prompt": False}):
        request = stream_request("m", prompt, {"logprobs": 0}, whole=True)
        names = [tensor.name for tensor in request.inputs]
        content = deserialize_bytes_tensor(request.raw_input_contents[names.index("messages")])
        assert json.loads(content.item()) == prompt
        assert {"return_logprobs", "exclude_input_in_output"} <= set(names)
        assert not {"text_input", "input_ids", "stream", "return_prompt_logprobs"} & set(names)
    plain = stream_request("m", "x", {"logprobs": None}, add_special_tokens=False)
    tensors = dict(zip((t.name for t in plain.inputs), plain.raw_input_contents, strict=True))
    assert tensors["add_special_tokens"] == b"\0"
    assert "return_logprobs" not in tensors


def test_logprobs_of_parts_of_characters_keep_their_bytes() -> None:
    entries = {
        "5": {"logprob": -0.5, "rank": 2, "decoded_token": "\ufffd", "bytes": [0xE4]},
        "7": {"logprob": -0.1, "rank": 1, "decoded_token": "x"},
    }
    message = answers(("", [5], "length"))
    extra = response(logprobs=[json.dumps([entries])], prompt_logprobs=[json.dumps([None])])
    message.infer_response.outputs.extend(extra.infer_response.outputs)
    message.infer_response.raw_output_contents.extend(extra.infer_response.raw_output_contents)
    (chunk,) = StreamDecoder().decode(message)
    sampled = TokenLogprob(5, -0.5, 2, "\ufffd", b"\xe4")
    assert chunk.logprobs == ((sampled, TokenLogprob(7, -0.1, 1, "x", b"x")),)
    assert chunk.prompt_logprobs == (None,)


@pytest.mark.parametrize("prompt", [[1, 2, 3], (1, 2, 3), np.array([1, 2, 3], np.int64)])
def test_token_prompts_become_int32(prompt: Prompt) -> None:
    request = stream_request("m", prompt, {})
    names = [tensor.name for tensor in request.inputs]
    assert names[0] == "input_ids" and "text_input" not in names
    assert "sampling_parameters" not in names
    assert (request.inputs[0].datatype, list(request.inputs[0].shape)) == ("INT32", [3])
    assert np.frombuffer(request.raw_input_contents[0], np.int32).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([1.5], {}, "input_ids"),
        ([-1], {}, "input_ids"),
        ([2**31], {}, "input_ids"),
        ([[1]], {}, "input_ids"),
        ([True], {}, "input_ids"),
        ("\ud800", {}, "text_input"),
        ("x", {"temperature": float("nan")}, "sampling_parameters"),
        ("x", {"stop": {1}}, "sampling_parameters"),
        ([{"role": "user", "content": {1}}], {}, "messages"),
    ],
)
def test_what_fits_no_tensor_is_refused_by_name(
    prompt: Prompt, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        stream_request("m", prompt, params)


def test_parallel_answers_are_told_apart_and_end_each_in_its_time() -> None:
    decoder = StreamDecoder()
    first = decoder.decode(answers(("a", [1, 2], "None"), ("b", [3], "stop")))
    second = decoder.decode(answers(("c", [4], "length"), ("", [], "stop")))
    decoder.finish()
    assert first == [Chunk("a", (1, 2), None, 7, 2, 0, 4), Chunk("b", (3,), "stop", 7, 1, 1, 4)]
    assert second == [Chunk("c", (4,), "length", 7, 1, 0, 4)]


def test_a_single_answers_token_without_text_is_a_chunk() -> None:
    assert StreamDecoder().decode(answers(("", [9], "None"))) == [Chunk("", (9,), None, 7, 1, 0, 4)]


@pytest.mark.parametrize("messages", [[], [answers(("a", [1], "None"))]])
def test_a_stream_without_an_end_is_the_servers_fault(messages: list[Any]) -> None:
    decoder = StreamDecoder()
    for message in messages:
        decoder.decode(message)
    with pytest.raises(ServerError, match="ended before"):
        decoder.finish()


def test_responses_that_break_the_contract_are_the_servers_fault() -> None:
    with pytest.raises(ServerError, match="no output"):
        StreamDecoder().decode(response(text_output=["a"]))
    with pytest.raises(ServerError, match="1 output_ids for num_output_tokens"):
        message = answers(("a", [1], "None"))
        message.infer_response.raw_output_contents[3] = b"\x02\0\0\0"
        StreamDecoder().decode(message)


@pytest.mark.parametrize("step", ["", "in ensemble 'llm', "])
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("temperature: must be between 0 and 100, got -1", InvalidRequest),
        ("Request for unknown model: 'm' is not found", UnknownModel),
        ("queue_full: 128 requests wait; retry after 3 s", Unavailable),
        ("rate_limited: tenant 'x' is over its rate; retry after 1 s", Unavailable),
        ("draining: the model is being unloaded", Unavailable),
        ("engine_dead: its process has ended", Unavailable),
        ("deadline: timeout_s (2) is over", RequestTimeout),
        ("crash_limit: the request was in flight at 3 ends of the engine", ServerError),
        ("Stub process 'm_0_0' is not healthy.", Unavailable),
        ("Request was cancelled", RequestCancelled),
        ("internal error (KeyError); the server's log has more", ServerError),
    ],
)
def test_an_error_inside_a_stream_is_known_by_its_text(
    step: str, text: str, kind: type[Exception]
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        StreamDecoder().decode(service_pb2.ModelStreamInferResponse(error_message=step + text))


@pytest.mark.parametrize(
    ("code", "text", "kind", "reason"),
    [
        (grpc.StatusCode.CANCELLED, "deadline: timeout_s (2) is over", RequestTimeout, "deadline"),
        (grpc.StatusCode.CANCELLED, "Request was cancelled", RequestCancelled, None),
        (grpc.StatusCode.INTERNAL, "crash_limit: 3 ends", ServerError, "crash_limit"),
        (grpc.StatusCode.INTERNAL, "queue_full: 9 wait", Unavailable, "queue_full"),
        (grpc.StatusCode.UNAVAILABLE, "Connection refused", Unavailable, None),
        (grpc.StatusCode.UNKNOWN, None, ServerError, None),
    ],
)
def test_a_status_is_known_by_the_reason_in_its_text_and_then_by_its_code(
    code: grpc.StatusCode, text: str | None, kind: type[Exception], reason: str | None
) -> None:
    metadata = grpc.aio.Metadata()
    error = from_status(grpc.aio.AioRpcError(code, metadata, metadata, text))
    assert type(error) is kind
    assert (str(error), error.reason) == (text or "unknown", reason)


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [
        ("queue_full: 9 requests wait; retry after 3 s", 3.0),
        ("rate_limited: tenant 'retry after 9 s'; retry after 0.25 s", 0.25),
        ("draining: the server stops", None),
        (f"queue_full: retry after {'9' * 400} s", None),
    ],
)
def test_a_server_says_when_to_come_back(text: str, wait_s: float | None) -> None:
    assert Unavailable(text).retry_after_s == wait_s


def test_tokens_that_come_together_share_the_gap_before_them() -> None:
    builder = CompletionBuilder()
    for text, count in (("", 0), ("ab", 2), ("cde", 3)):
        time.sleep(0.03)
        reason = "length" if count == 3 else None
        builder.add(Chunk(text, tuple(range(count)), reason, 5, count))
    completion = builder.build()
    assert completion.text == "abcde"
    assert completion.token_ids == (0, 1, 0, 1, 2)
    assert (completion.num_input_tokens, completion.num_output_tokens) == (5, 5)
    assert completion.finish_reason == "length"
    assert completion.ttft_s >= 0.06
    assert len(completion.itl_s) == 4 and completion.itl_s[0] == 0.0
    assert completion.itl_s[1] == completion.itl_s[2] == completion.itl_s[3] >= 0.01
    assert completion.latency_s == pytest.approx(completion.ttft_s + sum(completion.itl_s))


def test_the_client_needs_neither_torch_nor_the_engine() -> None:
    code = "import sys, paged_client; print({'torch', 'paged_backend'} & set(sys.modules))"
    with run_python(code) as process:
        assert process.communicate(timeout=60) == ("set()\n", "")


def test_nobody_at_the_address() -> None:
    with Client(NOBODY) as client:
        assert not client.is_ready()
        with pytest.raises(Unavailable, match="Connection refused"):
            client.generate("x")


def run_python(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads and writes bytes."""
    folder = tmp_path_factory.mktemp("served")
    checkpoint = folder / "checkpoint"
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    make_checkpoint("llama2", checkpoint, vocab_size=len(letters), max_position_embeddings=8192)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    options = {"model": str(checkpoint), "kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 16}
    write_model_repository(folder / "models", "paged_llm", options, instances=2)
    return folder / "models"


@pytest.fixture(scope="module")
def server(repository: Path) -> Iterator[RunningServer]:
    with start_server(repository) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with Client(server.grpc_url, timeout=60) as connected:
        yield connected


def shown_of(server: RunningServer) -> dict[str, float]:
    """How many answers have ended, by the reason, and whether the server is ``busy``."""
    page = scrape(server.metrics_url)
    ended = page.by_label("request_success_total", "finished_reason")
    gauges = ("kv_blocks_used", "num_requests_running", "num_requests_waiting")
    return {**ended, "busy": sum(map(page.value, gauges))}


@contextmanager
def cut_short(server: RunningServer, *, has_begun: bool = True) -> Iterator[None]:
    """The server gives up the endless request of the block, and holds nothing afterwards.

    Without ``has_begun`` the caller may have given it up before it came to the server.
    """
    before = shown_of(server)
    yield
    deadline = time.monotonic() + 60
    idle_since = time.monotonic()
    while (shown := shown_of(server))["busy"] or shown["abort"] == before["abort"]:
        now = time.monotonic()
        assert now < deadline, (before, shown)
        idle_since = now if shown["busy"] else idle_since
        if not has_begun and now > idle_since + 5:
            assert shown["length"] == before["length"], "it went on to its natural end"
            break
        time.sleep(0.05)


@asynccontextmanager
async def awaiting(waits: AbstractContextManager[None]) -> AsyncIterator[None]:
    """Wait at the end of the block in another thread, so that this one's client can go on."""
    with ExitStack() as stack:
        stack.enter_context(waits)
        yield
        await asyncio.to_thread(stack.close)


@pytest.mark.server
def test_text_and_token_prompts_get_the_same_answer(client: Client) -> None:
    assert client.is_ready()
    from_text = client.generate("abc", max_tokens=24, **GREEDY)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    from_ids = client.generate([letters.index(c) for c in "abc"], max_tokens=24, **GREEDY)
    assert from_text.token_ids == from_ids.token_ids
    assert (from_text.num_input_tokens, from_text.num_output_tokens) == (3, 24)
    assert from_text.finish_reason == "length"
    assert len(from_text.itl_s) == 23
    # Equal where the stream fell behind and all its tokens came in one response.
    assert 0 < from_text.ttft_s <= from_text.latency_s


@pytest.mark.server
def test_a_streams_chunks_add_up_to_the_answer(client: Client) -> None:
    whole = client.generate("abc", max_tokens=40, **GREEDY)
    chunks = list(client.stream("abc", max_tokens=40, **GREEDY))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert tuple(t for chunk in chunks for t in chunk.token_ids) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"


@pytest.mark.server
def test_parallel_answers(client: Client) -> None:
    completion = client.generate("abc", n=3, seed=5, temperature=1.5, ignore_eos=True)
    assert [answer.num_output_tokens for answer in completion.answers] == [16, 16, 16]
    assert len({answer.token_ids for answer in completion.answers}) == 3


@pytest.mark.server
@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ("x", {"temperature": -1}, "temperature"),
        ("x", {"max_token": 1}, "max_token"),
        ("", {}, "text_input|prompt"),
        ([], {}, "input_ids|prompt"),
        ([10**6], {}, "input_ids|prompt"),
    ],
)
def test_the_servers_refusal_names_the_field(
    client: Client, prompt: Prompt, params: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        client.generate(prompt, **params)
    assert client.generate("x", max_tokens=1, **GREEDY).num_output_tokens == 1


@pytest.mark.server
def test_a_whole_answer_comes_in_one_piece(client: Client) -> None:
    pieces = client.generate("abc", max_tokens=12, n=2, seed=1, logprobs=1, ignore_eos=True)
    options = {"max_tokens": 12, "n": 2, "seed": 1, "logprobs": 1, "ignore_eos": True}
    chunks = list(client.stream("abc", whole=True, **options))
    assert [chunk.index for chunk in chunks] == [0, 1]
    for chunk, answer in zip(chunks, pieces.answers, strict=True):
        assert (chunk.text, chunk.token_ids) == (answer.text, answer.token_ids)
        assert chunk.logprobs == answer.logprobs
        assert [position[0].token_id for position in chunk.logprobs] == [*chunk.token_ids]


@pytest.mark.server
def test_logprobs_and_cached_tokens(client: Client) -> None:
    prompt = "some text that is long enough for a block or two"
    options = {"max_tokens": 2, "logprobs": 3, "prompt_logprobs": 1, **GREEDY}
    for completion in (client.generate(prompt, **options) for _ in range(2)):
        first, *rest = completion.prompt_logprobs
        assert first is None
        assert [position[0].text for position in rest] == [*prompt[1:]]
        for position in completion.answers[0].logprobs:
            assert [token.rank for token in position] == [1, 2, 3]
    assert client.generate(prompt, max_tokens=1).num_cached_tokens >= 16


@pytest.mark.server
def test_tasks(client: Client) -> None:
    ids = client.tokenize("h\u00e9llo")
    assert len(ids) == 6
    assert client.detokenize(ids) == "h\u00e9llo"
    info = client.info()
    assert (info.max_model_len, info.vocab_size, info.has_chat_template) == (8192, 256, False)
    with pytest.raises(InvalidRequest, match="messages: .* no chat template"):
        client.generate([{"role": "user", "content": "x"}])


@pytest.mark.server
def test_a_stopping_server_waits_for_open_requests_only(
    repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Errors and tasks leave nothing open; the server says how many requests it waits for."""

    async def ask(url: str) -> None:
        async with AsyncClient(url) as client:
            for _ in range(50):
                assert await client.detokenize([65])
                with pytest.raises(InvalidRequest):
                    await client.generate([999])

    with start_server(repository) as running, Client(running.grpc_url) as client:
        asyncio.run(ask(running.grpc_url))
        for _ in range(50):
            assert client.detokenize([65])
            with pytest.raises(InvalidRequest):
                client.generate([999])
        stream = client.stream("x", **ENDLESS)
        next(stream)
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(running.stop)
            time.sleep(2)
            stream.cancel()
            assert stopping.result() == 0  # not killed because it took one for open
    assert "paged-backend: the server waits for open requests to end: 1\n" in capfd.readouterr().err


@pytest.mark.server
def test_an_unknown_model_is_the_callers_mistake(server: RunningServer) -> None:
    with Client(server.grpc_url, "nobody") as client:
        assert not client.is_ready()
        with pytest.raises(UnknownModel, match="unknown model: 'nobody'"):
            client.generate("x")


@pytest.mark.server
def test_a_timeout_cancels_on_the_server(server: RunningServer, client: Client) -> None:
    with cut_short(server, has_begun=False), pytest.raises(RequestTimeout):
        client.generate("x", timeout=0.3, **ENDLESS)


@pytest.mark.server
def test_leaving_a_stream_early_cancels_it(server: RunningServer, client: Client) -> None:
    with cut_short(server), client.stream("x", **ENDLESS) as stream:
        next(stream)
    with cut_short(server):
        for _ in client.stream("x", **ENDLESS):
            break


@pytest.mark.server
def test_cancel_from_another_thread(server: RunningServer, client: Client) -> None:
    with cut_short(server):
        stream = client.stream("x", **ENDLESS)
        next(stream)
        threading.Timer(0.2, stream.cancel).start()
        with pytest.raises(RequestCancelled):
            list(stream)


@pytest.mark.server
def test_one_client_serves_many_threads(client: Client) -> None:
    expected = client.generate("abc", max_tokens=12, **GREEDY).token_ids
    outcomes: list[tuple[int, ...]] = []

    def ask() -> None:
        outcomes.append(client.generate("abc", max_tokens=12, **GREEDY).token_ids)

    threads = [threading.Thread(target=ask) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert outcomes == [expected] * 64


@pytest.mark.server
@pytest.mark.parametrize("ending", ["", "client.close()", "raise SystemExit"])
def test_a_program_that_ends_in_mid_stream_does_not_hang(
    server: RunningServer, ending: str
) -> None:
    code = (
        "from paged_client import Client\n"
        f"client = Client({server.grpc_url!r})\n"
        f"stream = client.stream('x', **{ENDLESS})\n"
        "print(next(stream).num_output_tokens > 0)\n"
        f"{ending}\n"
    )
    with cut_short(server), run_python(code) as process:
        assert process.communicate(timeout=120) == ("True\n", "")


@pytest.mark.server
def test_ctrl_c_ends_a_program_and_its_request(server: RunningServer) -> None:
    code = (
        "from paged_client import Client\n"
        f"for chunk in Client({server.grpc_url!r}).stream('x', **{ENDLESS}):\n"
        "    print('.', flush=True)\n"
    )
    with cut_short(server), run_python(code) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)
    assert process.returncode == -signal.SIGINT


@pytest.mark.server
def test_asyncio_streams_and_errors(server: RunningServer) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.grpc_url, timeout=60) as client:
            assert await client.is_ready()
            assert await client.models() == ("paged_llm",)
            assert await client.info() == ModelInfo(8192, 256, False)
            assert await client.detokenize(await client.tokenize("abc")) == "abc"
            asked = [client.generate("abc", max_tokens=12, **GREEDY) for _ in range(8)]
            completions = await asyncio.gather(*asked)
            assert len({completion.token_ids for completion in completions}) == 1
            chunks = [chunk async for chunk in client.stream("abc", max_tokens=12, **GREEDY)]
            assert "".join(chunk.text for chunk in chunks) == completions[0].text
            with pytest.raises(InvalidRequest, match="temperature"):
                await client.generate("x", temperature=-1)
            async with awaiting(cut_short(server, has_begun=False)):
                with pytest.raises(RequestTimeout):
                    await client.generate("x", timeout=0.3, **ENDLESS)
        async with AsyncClient(NOBODY) as nobody:
            assert not await nobody.is_ready()
            with pytest.raises(Unavailable):
                await nobody.generate("x")

    asyncio.run(scenario())


async def _leave_the_block(client: AsyncClient) -> None:
    async with client.stream("x", **ENDLESS) as stream:
        await anext(stream)


async def _close(client: AsyncClient) -> None:
    stream = client.stream("x", **ENDLESS)
    await anext(stream)
    await stream.aclose()
    with pytest.raises(RequestCancelled):
        async for _ in stream:
            pass


async def _cancel_the_task(client: AsyncClient) -> None:
    task = asyncio.create_task(client.generate("x", **ENDLESS))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def _time_out(client: AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await client.generate("x", **ENDLESS)


@pytest.mark.server
@pytest.mark.parametrize(
    ("leave", "has_begun"),
    [(_leave_the_block, True), (_close, True), (_cancel_the_task, False), (_time_out, False)],
)
def test_every_way_out_of_an_asyncio_stream_cancels_it(
    server: RunningServer, leave: Any, has_begun: bool
) -> None:
    async def scenario() -> None:
        async with AsyncClient(server.grpc_url) as client:
            async with awaiting(cut_short(server, has_begun=has_begun)):
                await leave(client)

    asyncio.run(scenario())


@pytest.mark.server
def test_a_stopping_server_does_not_wait_for_clients_that_left(server: RunningServer) -> None:
    """Some versions of tritonserver wait 30 s for a stream that ended in a race with its client.

    This test is the last one because it stops the server of all of them.
    """

    def leave_with_the_last_response(stub: Any) -> None:
        for _ in range(25):
            has_left = threading.Event()

            def requests(has_left: threading.Event = has_left) -> Iterator[Any]:
                yield stream_request("paged_llm", "x", {"max_tokens": 1, **GREEDY})
                has_left.wait()

            call = stub.ModelStreamInfer(requests())
            next(call)
            call.cancel()
            has_left.set()

    with grpc.insecure_channel(server.grpc_url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        threads = [
            threading.Thread(target=leave_with_the_last_response, args=(stub,)) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    started_at = time.monotonic()
    server.stop()
    assert time.monotonic() - started_at < 20

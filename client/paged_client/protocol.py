"""Converts between Python values and messages of the KServe gRPC protocol; does no I/O.

For programs with their own transport; other programs use Client or AsyncClient.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import serialize_byte_tensor

from paged_client._types import (
    Chunk,
    Embedding,
    EngineView,
    ModelInfo,
    Position,
    PredictionTokens,
    Score,
    SequenceView,
    TokenLogprob,
    ToolCallDelta,
)
from paged_client.errors import InvalidRequest, ServerError, from_text

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Tools: TypeAlias = Sequence[Mapping[str, Any]]
T = TypeVar("T")
Prompt: TypeAlias = str | Sequence[int] | Messages | Mapping[str, Any]
"""A text, token ids, chat messages, or an object with chat messages and rendering options."""

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_reconnect_backoff_ms", 2000),  # reconnect soon after a server restarts
]
READY_TIMEOUT_S = 5.0
_LARGE_BYTES = 2**16  # size of outputs; larger ones consist almost entirely of log-probabilities
_HERE = re.compile(r"(localhost|127\.[\d.]+|\[::1\]):\d+")

_TELLING_INPUTS = {"text_input", "input_ids", "task"}
_ASKED_FOR = (
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_output_ids",
    "return_num_cached_tokens",
)
_ASKED_FOR_WITH = {
    "logprobs": "return_logprobs",
    "prompt_logprobs": "return_prompt_logprobs",
    "prediction": "return_metrics",  # with the number of its tokens in the answer
}
# Options that are inputs of their own, not sampling parameters.
_TOOL_OPTIONS = ("tools", "tool_choice", "parallel_tool_calls")
_PARSED = ("return_tool_calls", "return_reasoning", "return_stop_reason")
_NOT_FINISHED = "None"
_NAME = "call_id"


def channel_options(address: str) -> list[tuple[str, int]]:
    """Return a channel's options.

    They disable the environment's proxy for local addresses, which gRPC would use otherwise.
    """
    return [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", 0 if _HERE.fullmatch(address) else 1)]


def stream_request(
    model: str,
    prompt: Prompt,
    params: Mapping[str, Any],
    *,
    whole: bool = False,
    add_special_tokens: bool = True,
    parsed: bool | None = None,
    asked_for: Iterable[str] = _ASKED_FOR,
) -> Any:
    """Return a ``ModelInferRequest`` to complete a prompt, streamed or in one response (``whole``).

    ``parsed`` asks for reasoning and tool calls apart from the text, and for the stop string that
    ended it; by default, it is true if ``params`` has tools.

    Raises InvalidRequest for values that cannot be put into tensors.
    """
    request = _request(model, prompt, add_special_tokens)
    if parsed or (parsed is None and params.get("tools")):
        asked_for = (*asked_for, *_PARSED)
    if not params.keys().isdisjoint(_TOOL_OPTIONS):
        _add_tools(request, params)
        params = {name: value for name, value in params.items() if name not in _TOOL_OPTIONS}
    if params:
        _add_text(request, "sampling_parameters", _json("sampling_parameters", params))
    _add_flag(request, "exclude_input_in_output" if whole else "stream")
    for name in asked_for:
        _add_flag(request, name)
    for field, name in _ASKED_FOR_WITH.items():
        if params.get(field) is not None:
            _add_flag(request, name)
    return request


def embedding_request(
    model: str, prompt: Prompt, params: Mapping[str, Any], *, add_special_tokens: bool = True
) -> Any:
    """Return a ``ModelInferRequest`` for the embedding of a prompt.

    ``params`` may have ``dimensions``, and parameters of all requests such as ``priority``.

    Raises InvalidRequest for values that cannot be put into tensors.
    """
    request = _request(model, prompt, add_special_tokens)
    _add_text(request, "task", "embed")
    return _with_counts(request, params)


def score_request(model: str, text: str, text_pair: str, params: Mapping[str, Any]) -> Any:
    """Return a ``ModelInferRequest`` for the score of a pair of texts.

    ``params`` may have parameters of all requests such as ``priority``.

    Raises InvalidRequest for values that cannot be put into tensors.
    """
    request = _request(model, text, True)
    _add_text(request, "text_pair", text_pair)
    _add_text(request, "task", "score")
    return _with_counts(request, params)


def _with_counts(request: Any, params: Mapping[str, Any]) -> Any:
    if params:
        _add_text(request, "sampling_parameters", _json("sampling_parameters", params))
    for name in ("return_num_input_tokens", "return_num_cached_tokens"):
        _add_flag(request, name)
    return request


def task_request(
    task: str,
    model: str,
    prompt: Prompt | None = None,
    *,
    add_special_tokens: bool = True,
    tenant: str | None = None,
    tool_options: Mapping[str, Any] | None = None,
    is_prompt: bool = False,
) -> Any:
    """Return a ``ModelInferRequest`` for a task that the model performs without generating.

    ``tool_options`` may have ``tools`` and ``tool_choice`` for the task ``tokenize``, and
    ``is_prompt`` is for the task ``detokenize``: an answer's text follows.
    """
    request = _request(model, prompt, add_special_tokens)
    _add_text(request, "task", task)
    if is_prompt:
        _add_flag(request, "stream")
    _add_tools(request, tool_options or {})
    if tenant is not None:
        request.parameters["tenant"].string_param = tenant
    return request


def adapter_request(
    model: str, name: str, path: str | None = None, *, in_place: bool = False
) -> Any:
    """Return a ``ModelInferRequest`` to load a LoRA adapter, or to unload it without a path."""
    request = task_request("unload_adapter" if path is None else "load_adapter", model)
    params: dict[str, Any] = {"lora_name": name}
    if path is not None:
        params |= {"lora_path": path, "load_inplace": in_place}
    _add_text(request, "sampling_parameters", _json("sampling_parameters", params))
    return request


def check_done(response: Any) -> None:
    """Check the response to a task without a result. Raises ClientError."""
    if response.error_message:
        raise from_text(response.error_message)


def give_name(request: Any) -> str:
    """Give a ``ModelInferRequest`` a new name that nobody can guess, and return the name."""
    name = uuid.uuid4().hex
    request.parameters[_NAME].string_param = name
    return name


def cancel_request(model: str, name: str) -> Any:
    """Return a ``ModelInferRequest`` that cancels the open requests of a name.

    Its response comes when they have ended.
    """
    request = task_request("cancel", model)
    request.parameters[_NAME].string_param = name
    return request


def ready_request(model: str) -> Any:
    """Return a ``ModelReadyRequest``."""
    return service_pb2.ModelReadyRequest(name=model)


def index_request() -> Any:
    """Return a ``RepositoryIndexRequest`` for the models that accept requests."""
    return service_pb2.RepositoryIndexRequest(ready=True)


def config_request(model: str) -> Any:
    """Return a ``ModelConfigRequest``."""
    return service_pb2.ModelConfigRequest(name=model)


def speaks_this_contract(config: Any) -> bool:
    """Return True if a ``ModelConfigResponse`` describes a model that this library supports."""
    return _TELLING_INPUTS <= {tensor.name for tensor in config.config.input}


def decode_token_ids(response: Any) -> tuple[int, ...]:
    """Return the token ids in the response to the task ``tokenize``."""
    return tuple(_output(_result(response), "output_ids").tolist())


def decode_text(response: Any) -> str:
    """Return the text in the response to the task ``detokenize``."""
    text: bytes = _output(_result(response), "text_output").item()
    return text.decode(errors="replace")


def decode_embedding(response: Any) -> Embedding:
    """Return the embedding in the response to the task ``embed``.

    If the response is an error, raises the corresponding ClientError.
    """
    result = _result(response)
    return Embedding(
        _output(result, "embedding"),
        int(_output(result, "num_input_tokens").item()),
        int(_output(result, "num_cached_tokens").item()),
    )


def decode_score(response: Any) -> Score:
    """Return the score in the response to the task ``score``.

    If the response is an error, raises the corresponding ClientError.
    """
    result = _result(response)
    return Score(
        float(_output(result, "score").item()),
        int(_output(result, "num_input_tokens").item()),
        int(_output(result, "num_cached_tokens").item()),
    )


def decode_info(response: Any) -> ModelInfo:
    """Parse the response to the task ``info``. Raises ServerError if a field is missing."""
    values = json.loads(decode_text(response))
    try:
        return ModelInfo(**{name: values[name] for name in ModelInfo.__slots__})
    except KeyError as error:
        raise ServerError(f"the model's info has no {error}") from None


def decode_view(response: Any) -> EngineView:
    """Parse the response to the task ``inspect``. Raises ServerError if it is malformed."""
    values = json.loads(decode_text(response))
    try:
        sequences = [
            SequenceView(**{**entry, "block_ids": tuple(entry["block_ids"])})
            for entry in values["sequences"]
        ]
        return EngineView(
            block_size=values["block_size"],
            num_blocks=values["num_blocks"],
            sequences=tuple(sequences),
            cached_block_ids=tuple(values["cached_block_ids"]),
        )
    except (KeyError, TypeError) as error:
        raise ServerError(f"the engine's view cannot be read: {error!r}") from None


def is_large(response: Any) -> bool:
    """Return True if a ``ModelStreamInferResponse`` takes over about a millisecond to decode."""
    return sum(map(len, response.infer_response.raw_output_contents)) > _LARGE_BYTES


class SingleDecoder(Generic[T]):
    """Converts the only response of a stream, an embedding or a score, by ``decode_one``."""

    def __init__(self, decode_one: Callable[[Any], T]) -> None:
        self._decode_one = decode_one
        self._has_ended = False

    def decode(self, response: Any) -> list[T]:
        """Return the result in a ``ModelStreamInferResponse``.

        If the response is an error, raises the corresponding ClientError.
        """
        self._has_ended = True
        return [self._decode_one(response)]

    def finish(self) -> None:
        """Check the end of the stream; raises ServerError if there was no response."""
        if not self._has_ended:
            raise ServerError("the stream ended without a response")


class StreamDecoder:
    """Converts the responses of one stream into chunks and tracks which completions have ended."""

    def __init__(self) -> None:
        self._open: set[int] | None = None

    def decode(self, response: Any) -> list[Chunk]:
        """Return the chunks in a ``ModelStreamInferResponse``, in order of their ``index``.

        If the response is an error, raises the corresponding ClientError.
        """
        result = _result(response)
        texts = _output(result, "text_output")
        counts = _output(result, "num_output_tokens").tolist()
        reasons = [reason.decode() for reason in _output(result, "finish_reason")]
        num_input_tokens = int(_output(result, "num_input_tokens").item())
        num_cached_tokens = int(_output(result, "num_cached_tokens").item())
        logprobs = _logprobs(result, "logprobs", len(texts))
        (prompt_logprobs,) = _logprobs(result, "prompt_logprobs", 1)
        token_ids = _split(_output(result, "output_ids").tolist(), counts)
        reasoning = _texts(result, "reasoning", len(texts))
        tool_calls = _texts(result, "tool_calls", len(texts))
        stop_reasons = _texts(result, "stop_reason", len(texts))
        metrics = _texts(result, "metrics", len(texts))
        if self._open is None:
            self._open = set(range(len(texts)))
        chunks = [
            Chunk(
                text=texts[index].decode(errors="replace"),
                token_ids=token_ids[index],
                finish_reason=None if reasons[index] == _NOT_FINISHED else reasons[index],
                num_input_tokens=num_input_tokens,
                num_output_tokens=counts[index],
                index=index,
                num_cached_tokens=num_cached_tokens,
                logprobs=logprobs[index],
                prompt_logprobs=prompt_logprobs,
                reasoning=reasoning[index],
                tool_calls=_tool_calls(tool_calls[index]),
                stop_reason=stop_reasons[index],
                prediction_tokens=_prediction_tokens(metrics[index]),
            )
            for index in sorted(self._open)
        ]
        self._open -= {chunk.index for chunk in chunks if chunk.finish_reason is not None}
        return [chunk for chunk in chunks if len(texts) == 1 or _says_something(chunk)]

    def finish(self) -> None:
        """Check the end of the stream; raises ServerError if a completion has not ended."""
        if self._open is None or self._open:
            raise ServerError("the stream ended before its answer did")


def _says_something(chunk: Chunk) -> bool:
    content = (chunk.text, chunk.reasoning, chunk.tool_calls)
    return bool(chunk.num_output_tokens or chunk.finish_reason or any(content))


def _result(response: Any) -> InferResult:
    if response.error_message:
        raise from_text(response.error_message)
    return InferResult(response.infer_response)


def _output(result: InferResult, name: str) -> NDArray[Any]:
    array: NDArray[Any] | None = result.as_numpy(name)
    if array is None:
        raise ServerError(f"the response has no output {name!r}")
    return array


def _texts(result: InferResult, name: str, count: int) -> list[str]:
    """Return a text for each of ``count`` completions; empty if they were not requested."""
    array = result.as_numpy(name)
    if array is None:
        return [""] * count
    return [text.decode(errors="replace") for text in array.tolist()]


def _tool_calls(text: str) -> tuple[ToolCallDelta, ...]:
    return tuple(
        ToolCallDelta(
            part["index"],
            part["function"]["arguments"],
            part.get("id"),
            part["function"].get("name"),
        )
        for part in json.loads(text or "[]")
    )


def _prediction_tokens(metrics: str) -> PredictionTokens | None:
    """Return the numbers in the metrics of a completion; None if they were not requested."""
    if not metrics:
        return None
    values = json.loads(metrics) or {}  # null before the first token
    names = ("accepted_prediction_tokens", "rejected_prediction_tokens")
    return PredictionTokens(*(values.get(name, 0) for name in names))


def _logprobs(result: InferResult, name: str, count: int) -> list[tuple[Any, ...]]:
    """Return the positions of each of ``count`` completions; empty if they were not requested."""
    array = result.as_numpy(name)
    if array is None:
        return [()] * count
    return [tuple(map(_position, json.loads(text) or ())) for text in array.tolist()]


def _position(entries: Mapping[str, Any] | None) -> Position | None:
    if entries is None:
        return None
    return tuple(
        TokenLogprob(
            token_id=int(token_id),
            logprob=entry["logprob"],
            rank=entry["rank"],
            text=entry["decoded_token"],
            content=bytes(entry["bytes"]) if "bytes" in entry else entry["decoded_token"].encode(),
        )
        for token_id, entry in entries.items()
    )


def _split(token_ids: list[int], counts: list[int]) -> list[tuple[int, ...]]:
    """Split the flat tensor of concatenated completions into the token ids of each completion."""
    if sum(counts) != len(token_ids):
        raise ServerError(f"{len(token_ids)} output_ids for num_output_tokens {counts}")
    ends = np.cumsum(counts).tolist()
    return [tuple(token_ids[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def _request(model: str, prompt: Prompt | None, add_special_tokens: bool) -> Any:
    request = service_pb2.ModelInferRequest(model_name=model)
    if isinstance(prompt, str):
        _add_text(request, "text_input", prompt)
        if not add_special_tokens:
            _add_tensor(request, "add_special_tokens", "BOOL", [1], b"\x00")
    elif _is_chat(prompt):
        _add_text(request, "messages", _json("messages", prompt))
    elif prompt is not None:
        token_ids = _token_ids(prompt)
        _add_tensor(request, "input_ids", "INT32", [len(token_ids)], token_ids.tobytes())
    return request


def _add_tools(request: Any, params: Mapping[str, Any]) -> None:
    if params.get("tools") is not None:
        _add_text(request, "tools", _json("tools", params["tools"]))
    if (choice := params.get("tool_choice")) is not None:
        text = choice if isinstance(choice, str) else _json("tool_choice", choice)
        _add_text(request, "tool_choice", text)
    if params.get("parallel_tool_calls") is not None:
        value = b"\x01" if params["parallel_tool_calls"] else b"\x00"
        _add_tensor(request, "parallel_tool_calls", "BOOL", [1], value)


def _is_chat(prompt: Any) -> bool:
    if isinstance(prompt, Mapping):
        return True
    return prompt is not None and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _add_tensor(request: Any, name: str, datatype: str, shape: list[int], content: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(content)


def _add_flag(request: Any, name: str) -> None:
    _add_tensor(request, name, "BOOL", [1], b"\x01")


def _add_text(request: Any, name: str, text: str) -> None:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name}: not valid Unicode: {error.reason}") from None
    serialized: bytes = serialize_byte_tensor(np.array([content], dtype=np.object_)).item()
    _add_tensor(request, name, "BYTES", [1], serialized)


def _token_ids(prompt: Any) -> NDArray[np.int32]:
    array = np.asarray(prompt)
    if array.size == 0:
        return np.zeros(0, np.int32)
    int32 = np.iinfo(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest("input_ids: must be a flat sequence of integers")
    if array.min() < 0 or array.max() > int32.max:
        raise InvalidRequest(f"input_ids: must be between 0 and {int32.max}")
    return array.astype(np.int32)


def _json(name: str, value: Any) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name}: {error}") from None

"""Between Python values and the messages of the KServe gRPC protocol; does no I/O."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferResult, service_pb2
from tritonclient.utils import serialize_byte_tensor

from paged_client._errors import InvalidRequest, ServerError, from_text
from paged_client._types import Chunk

Prompt: TypeAlias = str | Sequence[int]

CHANNEL_OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
READY_TIMEOUT_S = 5.0

_ASKED_FOR = (
    "stream",
    "return_finish_reason",
    "return_num_input_tokens",
    "return_num_output_tokens",
    "return_output_ids",
)
_NOT_FINISHED = "None"


def stream_request(model: str, prompt: Prompt, params: Mapping[str, Any]) -> Any:
    """A ``ModelInferRequest`` for a streamed answer to a text or to token ids.

    Raises InvalidRequest for what cannot be put into tensors.
    """
    request = service_pb2.ModelInferRequest(model_name=model)
    if isinstance(prompt, str):
        _add_tensor(request, "text_input", "BYTES", [1], _text_bytes("text_input", prompt))
    else:
        token_ids = _token_ids(prompt)
        _add_tensor(request, "input_ids", "INT32", [len(token_ids)], token_ids.tobytes())
    if params:
        text = _json(params)
        _add_tensor(
            request, "sampling_parameters", "BYTES", [1], _text_bytes("sampling_parameters", text)
        )
    for name in _ASKED_FOR:
        _add_tensor(request, name, "BOOL", [1], b"\x01")
    return request


def ready_request(model: str) -> Any:
    """A ``ModelReadyRequest``."""
    return service_pb2.ModelReadyRequest(name=model)


class StreamDecoder:
    """Turns the responses of one stream into chunks and knows when its answers are complete."""

    def __init__(self) -> None:
        self._open: set[int] | None = None

    def decode(self, response: Any) -> list[Chunk]:
        """What a ``ModelStreamInferResponse`` adds, in the order of the answers.

        Raises the ClientError that the response stands for, if it is one.
        """
        if response.error_message:
            raise from_text(response.error_message)
        result = InferResult(response.infer_response)
        texts = _output(result, "text_output")
        counts = _output(result, "num_output_tokens").tolist()
        reasons = [reason.decode() for reason in _output(result, "finish_reason")]
        num_input_tokens = int(_output(result, "num_input_tokens").item())
        token_ids = _split(_output(result, "output_ids").tolist(), counts)
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
            )
            for index in sorted(self._open)
        ]
        self._open -= {chunk.index for chunk in chunks if chunk.finish_reason is not None}
        return [chunk for chunk in chunks if len(texts) == 1 or _says_something(chunk)]

    def finish(self) -> None:
        """To be called at the end of the stream; raises ServerError if an answer has no end."""
        if self._open is None or self._open:
            raise ServerError("the stream ended before its answer did")


def _says_something(chunk: Chunk) -> bool:
    return bool(chunk.num_output_tokens or chunk.text or chunk.finish_reason)


def _output(result: InferResult, name: str) -> NDArray[Any]:
    array: NDArray[Any] | None = result.as_numpy(name)
    if array is None:
        raise ServerError(f"the response has no output {name!r}")
    return array


def _split(token_ids: list[int], counts: list[int]) -> list[tuple[int, ...]]:
    """The answers' tokens come one answer after the other in one flat tensor."""
    if sum(counts) != len(token_ids):
        raise ServerError(f"{len(token_ids)} output_ids for num_output_tokens {counts}")
    ends = np.cumsum(counts).tolist()
    return [tuple(token_ids[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def _add_tensor(request: Any, name: str, datatype: str, shape: list[int], content: bytes) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(content)


def _text_bytes(name: str, text: str) -> bytes:
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{name}: not valid Unicode: {error.reason}") from None
    serialized: bytes = serialize_byte_tensor(np.array([content], dtype=np.object_)).item()
    return serialized


def _token_ids(prompt: Sequence[int]) -> NDArray[np.int32]:
    array = np.asarray(prompt)
    if array.size == 0:
        return np.zeros(0, np.int32)
    int32 = np.iinfo(np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise InvalidRequest("input_ids: must be a flat sequence of integers")
    if array.min() < 0 or array.max() > int32.max:
        raise InvalidRequest(f"input_ids: must be between 0 and {int32.max}")
    return array.astype(np.int32)


def _json(params: Mapping[str, Any]) -> str:
    try:
        return json.dumps(params, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"sampling_parameters: {error}") from None

"""KServe's gRPC protocol: one ``ModelStreamInfer`` call for each request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from paged_client.protocol import stream_request

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_loadtest.protocols import triton
from paged_loadtest.protocols.decoding import ResponseDecoder


def encode(
    request: WorkloadRequest,
    model: str,
    inputs: Collection[str] | None = None,
    cache_salt: str | None = None,
) -> Any:
    """Encode a ``ModelInferRequest``, given the model's inputs (None: one of our models)."""
    return stream_request(
        model,
        request.prompt,
        triton.sampling_parameters(request, cache_salt),
        asked_for=triton.asked_for(inputs),
    )


class TritonGrpcDecoder(ResponseDecoder[Any]):
    """Decodes ``ModelStreamInferResponse`` messages."""

    def feed(self, data: Any, now_s: float) -> None:
        if data.error_message:
            self.fail(data.error_message)
            return
        response = data.infer_response
        names = [output.name for output in response.outputs]
        # Each tensor has one element, for one completion: a 4-byte integer, or a string after its
        # 4-byte length.
        raw = dict(zip(names, response.raw_output_contents, strict=False))
        triton.take_response(
            self,
            now_s,
            text=raw.get("text_output", b"")[4:].decode(errors="replace"),
            finish_reason=raw.get("finish_reason", b"")[4:].decode(),
            num_output_tokens=_integer(raw.get("num_output_tokens")) or 0,
            num_input_tokens=_integer(raw.get("num_input_tokens")) or 0,
            num_cached_tokens=_integer(raw.get("num_cached_tokens")),
        )


def _integer(raw: bytes | None) -> int | None:
    return None if raw is None else int.from_bytes(raw, "little")

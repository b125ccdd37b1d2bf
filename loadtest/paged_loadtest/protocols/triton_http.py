"""Triton's ``generate_stream``: tensors as JSON in, server-sent events out."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_loadtest.destination import ServerInfo
from paged_loadtest.protocols import triton
from paged_loadtest.protocols.decoding import EventDecoder


def model_path(model: str) -> str:
    """Return the path of a model; requests are posted to ``generate_stream`` below it."""
    return f"/v2/models/{quote(model, safe='')}"


def server_info(server: str, answer: Mapping[str, Any]) -> ServerInfo:
    """Read the limits of one of our models from its answer to the task ``info``."""
    info = json.loads(answer["text_output"])
    return ServerInfo(server, info["vocab_size"], info["max_model_len"])


def encode(
    request: WorkloadRequest,
    model: str,
    inputs: Collection[str] | None = None,
    cache_salt: str | None = None,
) -> bytes:
    """Encode the body to post, given the model's inputs (None: one of our models)."""
    body = {
        **_prompt(request),
        "stream": True,
        "sampling_parameters": json.dumps(triton.sampling_parameters(request, cache_salt)),
        **dict.fromkeys(triton.asked_for(inputs), True),
    }
    return json.dumps(body).encode()


class TritonHttpDecoder(EventDecoder):
    """Decodes the response body."""

    def _take(self, event: Any, now_s: float) -> None:
        if "error" in event:
            self.fail(event["error"])
            return
        triton.take_response(
            self,
            now_s,
            text=event["text_output"],
            finish_reason=event.get("finish_reason", ""),
            num_output_tokens=event["num_output_tokens"],
            num_input_tokens=event["num_input_tokens"],
            num_cached_tokens=event.get("num_cached_tokens"),
        )


def _prompt(request: WorkloadRequest) -> dict[str, Any]:
    prompt = request.prompt
    if isinstance(prompt, str):
        return {"text_input": prompt}
    if prompt and isinstance(prompt[0], Mapping):
        return {"messages": json.dumps(prompt)}
    return {"input_ids": prompt}

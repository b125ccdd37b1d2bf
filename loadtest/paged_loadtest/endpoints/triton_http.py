"""Endpoint for Triton's HTTP ``generate_stream``."""

from __future__ import annotations

import json
from urllib.parse import quote

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError
from paged_loadtest.endpoints.complaints import check_inputs, unknown_model, unreachable
from paged_loadtest.endpoints.endpoint import ServerInfo
from paged_loadtest.endpoints.http import HttpEndpoint
from paged_loadtest.options import TargetOptions
from paged_loadtest.protocols import triton_http
from paged_loadtest.timeline import Timeline


class TritonHttpEndpoint(HttpEndpoint):
    """Sends the same tensors as over gRPC, as JSON."""

    def __init__(self, target: TargetOptions) -> None:
        super().__init__(target, headers={})
        self._inputs: frozenset[str] = frozenset()
        self._path = triton_http.path(target.model)
        self._model = f"/v2/models/{quote(target.model, safe='')}"

    async def check(self) -> ServerInfo:
        """Read the model's inputs, and its limits if it is one of ours."""
        status, server = await self._ask("GET", "/v2")
        if status != 200 or not isinstance(server, dict) or "version" not in server:
            raise unreachable(self._target, f"HTTP {status}")
        if not await self.is_ready():
            raise unknown_model(self._target, await self._ready_models())
        _, config = await self._ask("GET", f"{self._model}/config")
        self._inputs = frozenset(tensor["name"] for tensor in config["input"])
        check_inputs(self._target, self._inputs)
        name = f"{server['name']} {server['version']}"
        if "task" not in self._inputs:  # another server's model
            return ServerInfo(name)
        self._knows_salt = True
        _, answer = await self._ask("POST", f"{self._model}/generate", {"task": "info"})
        info = json.loads(answer["text_output"])
        return ServerInfo(name, info["vocab_size"], info["max_model_len"])

    async def is_ready(self) -> bool:
        """Return True if the model accepts requests now."""
        try:
            status, _ = await self._ask("GET", f"{self._model}/ready")
        except ConfigError:
            return False
        return status == 200

    async def send(self, request: WorkloadRequest) -> Timeline:
        """Send a request and wait for the end of its response."""
        body = triton_http.encode(request, self._target.model, self._inputs, self._cache_salt)
        return await self._stream(self._path, body, triton_http.TritonHttpDecoder)

    async def _ready_models(self) -> list[str]:
        status, index = await self._ask("POST", "/v2/repository/index", {"ready": True})
        return [model["name"] for model in index] if status == 200 else []

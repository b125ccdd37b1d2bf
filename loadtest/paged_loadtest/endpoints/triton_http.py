"""Endpoint for Triton's HTTP ``generate_stream``."""

from __future__ import annotations

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_backend.values.errors import ConfigError
from paged_loadtest.destination import ServerInfo
from paged_loadtest.endpoints.http import HttpEndpoint
from paged_loadtest.options import TargetOptions
from paged_loadtest.protocols import triton_http
from paged_loadtest.protocols.triton import check_inputs
from paged_loadtest.timeline import Timeline


class TritonHttpEndpoint(HttpEndpoint):
    """Sends the same tensors as over gRPC, as JSON."""

    def __init__(self, target: TargetOptions) -> None:
        super().__init__(target, headers={})
        self._inputs: frozenset[str] = frozenset()
        self._model = triton_http.model_path(target.model)

    async def check(self) -> ServerInfo:
        """Read the model's inputs, and its limits if it is one of ours."""
        status, server = await self._ask("GET", "/v2")
        if status != 200 or not isinstance(server, dict) or "version" not in server:
            raise self._destination.unreachable(f"HTTP {status}")
        if not await self.is_ready():
            raise self._destination.unknown_model(await self._ready_models())
        _, config = await self._ask("GET", f"{self._model}/config")
        self._inputs = frozenset(tensor["name"] for tensor in config["input"])
        check_inputs(self._target.model, self._inputs)
        name = f"{server['name']} {server['version']}"
        if "task" not in self._inputs:  # another server's model
            return ServerInfo(name)
        self._knows_salt = True
        _, answer = await self._ask("POST", f"{self._model}/generate", {"task": "info"})
        return triton_http.server_info(name, answer)

    async def is_ready(self) -> bool:
        try:
            status, _ = await self._ask("GET", f"{self._model}/ready")
        except ConfigError:
            return False
        return status == 200

    async def send(self, request: WorkloadRequest) -> Timeline:
        body = triton_http.encode(request, self._target.model, self._inputs, self._cache_salt)
        path = f"{self._model}/generate_stream"
        return await self._stream(path, body, triton_http.TritonHttpDecoder)

    async def _ready_models(self) -> list[str]:
        status, index = await self._ask("POST", "/v2/repository/index", {"ready": True})
        return [model["name"] for model in index] if status == 200 else []

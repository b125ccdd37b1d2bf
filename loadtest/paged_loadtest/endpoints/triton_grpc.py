"""Endpoint for Triton's gRPC."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import grpc
from paged_client import AsyncClient
from paged_client.protocol import channel_options
from tritonclient.grpc import service_pb2, service_pb2_grpc

from paged_backend.tools.workloads.request import WorkloadRequest
from paged_loadtest.destination import PROBE_TIMEOUT_S, ServerInfo
from paged_loadtest.endpoints.endpoint import Endpoint
from paged_loadtest.options import TargetOptions
from paged_loadtest.protocols.triton import check_inputs
from paged_loadtest.protocols.triton_grpc import TritonGrpcDecoder, encode
from paged_loadtest.timeline import Timeline


class TritonGrpcEndpoint(Endpoint):
    """One stream per request, all over one connection."""

    def __init__(self, target: TargetOptions) -> None:
        super().__init__(target)
        self._inputs: frozenset[str] = frozenset()
        self._channel = grpc.aio.insecure_channel(
            target.address, options=channel_options(target.address)
        )
        self._stub: Any = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def check(self) -> ServerInfo:
        """Read the model's inputs, and its limits if it is one of ours."""
        try:
            server = await self._stub.ServerMetadata(
                service_pb2.ServerMetadataRequest(), timeout=PROBE_TIMEOUT_S
            )
        except grpc.RpcError as error:
            reason = error.details() or error.code().name
            raise self._destination.unreachable(reason) from error
        if not await self.is_ready():
            raise self._destination.unknown_model(await self._ready_models())
        request = service_pb2.ModelConfigRequest(name=self._target.model)
        answer = await self._stub.ModelConfig(request, timeout=PROBE_TIMEOUT_S)
        self._inputs = frozenset(tensor.name for tensor in answer.config.input)
        check_inputs(self._target.model, self._inputs)
        name = f"{server.name} {server.version}"
        if "task" not in self._inputs:  # another server's model
            return ServerInfo(name)
        self._knows_salt = True
        async with AsyncClient(self._target.address, self._target.model) as client:
            info = await client.info()
        return ServerInfo(name, info.vocab_size, info.max_model_len)

    async def is_ready(self) -> bool:
        request = service_pb2.ModelReadyRequest(name=self._target.model)
        try:
            answer = await self._stub.ModelReady(request, timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError:
            return False
        return bool(answer.ready)

    async def send(self, request: WorkloadRequest) -> Timeline:
        message = encode(request, self._target.model, self._inputs, self._cache_salt)
        timeline = Timeline(perf_counter())
        decoder = TritonGrpcDecoder(timeline)
        call = self._stub.ModelStreamInfer(iter((message,)), timeout=self._target.request_timeout)
        try:
            while (response := await call.read()) is not grpc.aio.EOF:
                decoder.feed(response, perf_counter())
        except grpc.RpcError as error:
            decoder.fail(error.details() or error.code().name)
        finally:
            call.cancel()
        decoder.finish()
        return timeline

    async def aclose(self) -> None:
        await self._channel.close()

    async def _ready_models(self) -> list[str]:
        request = service_pb2.RepositoryIndexRequest(ready=True)
        try:
            index = await self._stub.RepositoryIndex(request, timeout=PROBE_TIMEOUT_S)
        except grpc.RpcError:  # a server can disable the index
            return []
        return [model.name for model in index.models]

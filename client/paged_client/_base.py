"""What the clients for threads and for asyncio share: a connection to one model, and its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tritonclient.grpc import service_pb2_grpc

from paged_client.errors import ServerError


class BaseClient:
    """A channel to a server, and the calls of one model on it."""

    def __init__(self, channel: Any, model: str, timeout: float | None) -> None:
        self._model = model
        self._timeout = timeout
        self._channel = channel
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def _call(self, request: Any, timeout: float | None) -> Any:
        """Start a call with one request; it ends after `timeout` s, or after the client's."""
        return self._stub.ModelStreamInfer(
            iter((request,)), timeout=self._timeout if timeout is None else timeout
        )


def only_response(responses: Sequence[Any]) -> Any:
    """Return the only response to a task.

    Raises:
        ServerError: there is none.
    """
    if not responses:
        raise ServerError("the stream ended without a response")
    return responses[0]

"""The model that tritonserver loads; its instances connect the server to the engine.

The server first starts a process that only completes the configuration, so what the front end needs
is imported when the model is initialized.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from paged_backend.serving.contract import Array
from paged_backend.serving.deployment import Deployment, has_model_control
from paged_backend.serving.requests.cancellation import Cancelled
from paged_backend.serving.shared_tensors import SharedTensors
from paged_backend.serving.triton import (
    complete_config,
    end_process,
    error_response,
    new_tensors,
    prepare_process,
    read_parameters,
    read_tensors,
    refusing_to_load,
    response,
)
from paged_backend.values.contract import INPUTS, OUTPUTS
from paged_backend.values.errors import RequestRefused
from paged_backend.values.garbage import keep_loaded, without_collections
from paged_backend.values.log import LOG

if TYPE_CHECKING:
    from paged_backend.serving.requests.open_requests import IncomingRequest

UNHEALTHY = "Model is unavailable due to unhealthy vLLM engine"


class TritonPythonModel:
    """One instance: a front end of the engine that all instances of the model share."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the tensors and the decoupled policy; tensors that the user declares are kept."""
        return complete_config(config, INPUTS, OUTPUTS, decoupled=True)

    def initialize(self, args: dict[str, str]) -> None:
        """Start the engine, or connect to the one that another instance started; wait for it."""
        self._open(Deployment.from_args(args))
        self._loaded.tokenizer.prepare_chat()

    def _open(self, deployment: Deployment) -> None:
        prepare_process()
        self._deployment = deployment
        # vllm_backend logs each cancellation, which its clients' tests look for.
        self._cancel_level = logging.INFO if self._deployment.backend == "vllm" else logging.DEBUG
        self._unloading = False
        with without_collections():
            from paged_backend.serving.loading import load
        with refusing_to_load():
            self._loaded = load(deployment)
        self._front_end = self._loaded.front_end
        self._tensors = SharedTensors(new_tensors, self._front_end.sending_thread)
        keep_loaded()

    def execute(self, requests: list[Any]) -> None:
        """Check and submit requests; the front end's thread sends the responses."""
        healthy = self._front_end.is_healthy or not self._deployment.unload_if_dead
        if not healthy:
            self._unload()
        for request in requests:
            sender = TritonSender(
                request.get_response_sender(), self._cancel_level, self._tensors.make
            )
            try:
                if not healthy:
                    raise Unhealthy
                incoming = self._incoming_requests(request, sender)
            # An exception that leaves this method would fail every request of the batch.
            except Exception as error:
                sender.fail(error)
            else:
                for accepted in incoming:
                    self._front_end.submit(accepted)

    def _incoming_requests(self, request: Any, sender: TritonSender) -> list[IncomingRequest]:
        """Return what the front end serves for one request of the server."""
        from paged_backend.serving.requests.open_requests import IncomingRequest

        tensors, parameters = read_tensors(request, INPUTS), read_parameters(request)
        return [IncomingRequest(tensors, parameters, timeout_s(request), sender)]

    def is_ready(self) -> bool:
        """Return whether requests are served; servers from 26.03 on ask this."""
        return self._front_end.is_ready

    def finalize(self) -> None:
        """Abort open requests and disconnect from the engine."""
        if hasattr(self, "_front_end"):
            self._front_end.stop()
            self._tensors.close()
            LOG.info("Shutdown complete")
        end_process()

    def _unload(self) -> None:
        """Ask the server to unload the model, once."""
        if self._unloading:
            return
        self._unloading = True
        if not has_model_control(os.getppid()):  # the server would refuse, and sometimes crash
            LOG.error("Engine is not healthy; without explicit model control the model stays")
            return
        LOG.error("Engine is not healthy and model will be unloaded")
        try:
            pb_utils.unload_model(self._deployment.name)
        except Exception as error:  # the server aborts if this leaves `execute`
            LOG.error(f"The server does not unload the model: {error}")


class Unhealthy(RequestRefused):
    """Refuses a request because the engine has failed.

    It is used only if the model's parameter ``ENABLE_VLLM_HEALTH_CHECK`` is on. In this case, the
    model also asks the server to unload the model, if the server has explicit model control.
    """

    def __init__(self) -> None:
        super().__init__("engine_dead", UNHEALTHY)
        self.args = (UNHEALTHY,)  # clients of vllm_backend compare it


class TritonSender:
    """The response sender of one request.

    Args:
        sender: the server's response sender.
        log_level: level of the lines about cancellation.
        make_tensors: makes the tensors of a response.
    """

    def __init__(
        self,
        sender: Any,
        log_level: int,
        make_tensors: Callable[[Mapping[str, Array]], list[Any]] = new_tensors,
    ) -> None:
        self._sender = sender
        self._log_level = log_level
        self._make_tensors = make_tensors

    def send(self, tensors: dict[str, Array], final: bool) -> None:
        """Send one response; blocks for the round trip to the server."""
        self.prepare(tensors, final)()

    def prepare(self, tensors: dict[str, Array], final: bool) -> Callable[[], None]:
        """Make one response; the result sends it, and blocks for the round trip to the server."""
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        return partial(self._sender.send, response(tensors, self._make_tensors), flags=flags)

    def end(self) -> None:
        """End the request without another response."""
        self._sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def fail(self, error: Exception) -> None:
        """Send an error as the final response."""
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._sender.send(error_response(error), flags=final)
        if isinstance(error, Cancelled):
            LOG.log(self._log_level, "Successfully cancelled the request")

    def is_cancelled(self) -> bool:
        """Whether the client has disconnected or canceled."""
        cancelled = bool(self._sender.is_cancelled())
        if cancelled:
            LOG.log(self._log_level, "Cancelling the request")
        return cancelled


def timeout_s(request: Any) -> float | None:
    """Return the server's timeout for a request; None if there is none."""
    return request.timeout() / 1e6 or None

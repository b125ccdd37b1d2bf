"""The model that tritonserver loads; nothing outside this module calls Triton's Python API."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from paged_backend.config import EngineConfig
from paged_backend.errors import EngineDead, InvalidRequest, PagedError, RequestRefused
from paged_backend.outputs import EngineStats
from paged_backend.process.engine_client import EngineClient
from paged_backend.process.lifetime import runtime_folder
from paged_backend.serving.contract import INPUTS, OUTPUTS, Array
from paged_backend.serving.front_end import Cancelled, FrontEnd
from paged_backend.serving.metrics import Metrics
from paged_backend.serving.parsing import RequestParser
from paged_backend.text.tokenizer import load_tokenizer

_INPUT_NAMES = [spec.name for spec in INPUTS]


class TritonPythonModel:
    """One instance: a front-end of the engine that all instances of the model share."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the tensors and the decoupled policy; what the user declared is kept."""
        declared = config.as_dict()
        for specs, key, add in (
            (INPUTS, "input", config.add_input),
            (OUTPUTS, "output", config.add_output),
        ):
            names = {tensor["name"] for tensor in declared[key]}
            for spec in specs:
                if spec.name not in names:
                    add(spec.as_config())
        config.set_max_batch_size(0)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the engine, starting it if this instance is the first, and wait for it."""
        try:
            self._front_end = _start_front_end(args)
        except PagedError as error:
            # For the terminal: the server wraps what is raised into a stack trace of its own.
            print(f"paged-backend: error: {error}", file=sys.stderr, flush=True)
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        """Check and submit; the responses come from the front-end's thread."""
        for request in requests:
            sender = TritonSender(request.get_response_sender())
            try:
                self._front_end.submit(_tensors(request), request.parameters(), sender)
            # An exception that left this method would hit every request of the call.
            except Exception as error:
                sender.fail(error)

    def is_ready(self) -> bool:
        """Asked by servers from 26.03 on."""
        return self._front_end.is_healthy

    def finalize(self) -> None:
        """End what is open and leave the engine."""
        if hasattr(self, "_front_end"):
            self._front_end.stop()


class TritonSender:
    """The response sender of one request."""

    def __init__(self, sender: Any) -> None:
        self._sender = sender

    def send(self, tensors: dict[str, Array], final: bool) -> None:
        """Send one response; blocks for the round trip to the server."""
        outputs = [pb_utils.Tensor(name, array) for name, array in tensors.items()]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(pb_utils.InferenceResponse(output_tensors=outputs), flags=flags)

    def fail(self, error: Exception) -> None:
        """Send an error as the final response."""
        triton_error = pb_utils.TritonError(_message(error), _code(error))
        self._sender.send(
            pb_utils.InferenceResponse(error=triton_error),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    def is_cancelled(self) -> bool:
        """Whether the caller has gone or has cancelled."""
        return bool(self._sender.is_cancelled())


class NoMetrics:
    """Stands in where the server was started without metrics."""

    def report(self, stats: EngineStats) -> None:
        """Nobody asks."""

    def report_dead(self) -> None:
        """Nobody asks."""


def _start_front_end(args: dict[str, str]) -> FrontEnd:
    name, version = args["model_name"], args["model_version"]
    config = EngineConfig.from_file(Path(args["model_repository"], version, "model.json"))
    server_pid = os.getppid()
    client = EngineClient(config, runtime_folder(server_pid, name, version), server_pid)
    ready = client.wait_until_ready()
    tokenizer = load_tokenizer(config.tokenizer or ready.model_folder)
    front_end = FrontEnd(
        client,
        RequestParser(tokenizer, ready.limits),
        tokenizer,
        _metrics({"model": name, "version": version}),
    )
    front_end.start()
    return front_end


def _metrics(labels: dict[str, str]) -> Metrics | NoMetrics:
    try:
        return Metrics(pb_utils.MetricFamily, labels)
    except pb_utils.TritonModelException as error:
        if "metrics not supported" not in str(error).lower():
            raise
        return NoMetrics()


def _tensors(request: Any) -> dict[str, Array]:
    found = {name: pb_utils.get_input_tensor_by_name(request, name) for name in _INPUT_NAMES}
    return {name: tensor.as_numpy() for name, tensor in found.items() if tensor is not None}


# By name: the stub that completes the configuration has no TritonError to take them from.
_CODES: list[tuple[type[Exception], str]] = [
    (InvalidRequest, "INVALID_ARG"),
    (Cancelled, "CANCELLED"),
    (RequestRefused, "UNAVAILABLE"),
    (EngineDead, "UNAVAILABLE"),
]


def _code(error: Exception) -> Any:
    names = (name for kind, name in _CODES if isinstance(error, kind))
    return getattr(pb_utils.TritonError, next(names, "INTERNAL"))


def _message(error: Exception) -> str:
    if isinstance(error, EngineDead):
        return f"engine_dead: {error}"
    if isinstance(error, (PagedError, Cancelled)):
        return str(error)
    print(f"paged-backend: internal error: {error!r}", file=sys.stderr, flush=True)
    return f"internal error ({type(error).__name__}); the server's log has more"

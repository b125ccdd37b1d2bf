"""The pipeline as a program (BLS): it calls the same models as the ensemble ``llm``, in turn.

Use it for what an ensemble cannot do, such as to call another model for some prompts, to answer
from a cache, or to call the model twice. Copy this file to a model's ``model.py`` and edit
``_run``.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton_python_backend_utils as pb_utils

from paged_backend.serving import fields, postprocess, preprocess, triton
from paged_backend.serving.contract import Array
from paged_backend.serving.pipeline import load_llm, parameter
from paged_backend.values import contract
from paged_backend.values.contract import named
from paged_backend.values.errors import RequestRefused

MAX_REQUESTS = 256  # that run at the same time; each has a thread
MAX_WAITING = 1024  # requests that wait for one of these threads; more are refused
_LOOK_S = 0.05  # between checks for clients that have disconnected

_STEP_INPUTS = {spec.name for spec in (*preprocess.INPUTS, *preprocess.OUTPUTS)}
# Outputs that do not pass through the last step, and the flags by which callers ask for them.
_FLAGS = tuple(
    spec
    for spec in contract.INPUTS
    if spec.name.startswith("return_") and spec.name not in _STEP_INPUTS
)
_PARSED = ("tool_calls", "reasoning")
_DIRECT = [*(spec.name.removeprefix("return_") for spec in _FLAGS), *_PARSED]
_INPUTS = (*preprocess.INPUTS, *_FLAGS)
_OUTPUTS = (*postprocess.OUTPUTS, *named(contract.OUTPUTS, *_DIRECT))


class TritonPythonModel:
    """Calls the steps that its config.pbtxt names."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the tensors and the decoupled policy."""
        return triton.complete_config(config, _INPUTS, _OUTPUTS, decoupled=True)

    def initialize(self, args: dict[str, str]) -> None:
        """Read the names of the steps, and start to watch for clients that disconnect."""
        self._llm = load_llm(args)
        self._preprocess = parameter(args, "preprocess")
        self._postprocess = parameter(args, "postprocess")
        self._callers: set[Caller] = set()
        self._threads = ThreadPoolExecutor(MAX_REQUESTS)
        self._room = threading.Semaphore(MAX_REQUESTS + MAX_WAITING)
        self._stopping = threading.Event()
        threading.Thread(target=self._watch, name="paged-watch", daemon=True).start()

    def execute(self, requests: list[Any]) -> None:
        """Start a thread for each request."""
        for request in requests:
            caller = Caller(request.get_response_sender())
            try:
                tensors = triton.read_tensors(request, _INPUTS)
                parameters = triton.read_parameters(request)
                if not self._room.acquire(blocking=False):
                    problem = f"{MAX_WAITING} requests wait for a thread; retry after 1 s"
                    raise RequestRefused("queue_full", problem)
            except Exception as error:  # would hit every request if it left this method
                caller.close(triton.error_response(error))
            else:
                self._threads.submit(self._serve, tensors, parameters, caller)

    def finalize(self) -> None:
        """Wait for open requests to finish."""
        self._threads.shutdown()
        self._stopping.set()
        self._llm.leave()

    def _serve(self, tensors: dict[str, Array], parameters: str, caller: Caller) -> None:
        self._callers.add(caller)
        try:
            for outputs in self._run(tensors, parameters, caller):
                caller.send(outputs)
        except Exception as error:
            caller.close(triton.error_response(error))
        else:
            caller.close()
        finally:
            self._callers.remove(caller)
            self._room.release()

    def _run(
        self, tensors: dict[str, Array], parameters: str, caller: Caller
    ) -> Iterator[dict[str, Array]]:
        """Run the pipeline for one request; each dictionary of outputs is a response."""
        flags = {spec.name: tensors.pop(spec.name) for spec in _FLAGS if spec.name in tensors}
        shared = {name: tensors[name] for name in contract.TOOL_INPUTS if name in tensors}
        prompt = triton.call(self._preprocess, tensors, _readable(parameters))
        caller.call_id = fields.string("call_id", prompt["call_id"])
        for part in triton.stream(self._llm.name, prompt | flags | shared):
            ids = {spec.name: part[spec.name] for spec in postprocess.INPUTS}
            is_parsed = not part.keys().isdisjoint(_PARSED)
            parsed = {contract.PARSED_TEXT: part["text_output"]} if is_parsed else {}
            text = triton.call(self._postprocess, ids | parsed)
            yield text | {name: part[name] for name in _DIRECT if name in part}

    def _watch(self) -> None:
        """Cancel the requests of clients that have disconnected, whatever the requests wait for."""
        while not self._stopping.wait(_LOOK_S):
            for caller in list(self._callers):
                # A server or a model that is about to end answers with errors.
                with contextlib.suppress(Exception):
                    if caller.call_id is not None and caller.has_left():
                        # Repeated at each check, as the model may not have the request yet.
                        self._llm.cancel(caller.call_id)


class Caller:
    """Sends responses to one client.

    Two threads use it: the thread that serves the request, and the one that watches all clients.
    """

    def __init__(self, sender: Any) -> None:
        self.call_id: str | None = None  # by which the model knows the request
        self._sender = sender
        self._lock = threading.Lock()
        self._closed = False

    def send(self, outputs: dict[str, Array]) -> None:
        """Send one response."""
        self._sender.send(triton.response(outputs))

    def close(self, error: Any = None) -> None:
        """End the request, with an error response if there was an error."""
        with self._lock:  # the server crashes if asked about a request that has ended
            self._closed = True
            self._sender.send(error, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def has_left(self) -> bool:
        """Whether the client has disconnected or canceled."""
        with self._lock:
            return not self._closed and bool(self._sender.is_cancelled())


def _readable(parameters: str) -> dict[str, bool | int | str]:
    """Return a request's parameters for another request, with numbers as strings."""
    values = json.loads(parameters or "{}")
    return {k: v if isinstance(v, (bool, int, str)) else str(v) for k, v in values.items()}

"""Tensors, responses, errors and log lines in Triton's Python API, for all our models."""

from __future__ import annotations

import faulthandler
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import triton_python_backend_utils as pb_utils

from paged_backend.serving.contract import Array
from paged_backend.serving.requests.cancellation import CANCELLED, Cancelled
from paged_backend.values.contract import TensorDeclaration
from paged_backend.values.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    PagedError,
    RequestRefused,
    as_exception,
)
from paged_backend.values.log import write_internal_error
from paged_backend.values.server_memory import close_to_other_users

# How the messages of refused requests, and of requests with a wrong field, begin.
_REFUSALS = ("queue_full", "rate_limited", "process_lost", "draining", "engine_dead")
_FIELD = re.compile(r"[A-Za-z_.]+")


def complete_config(
    config: Any,
    inputs: Sequence[TensorDeclaration],
    outputs: Sequence[TensorDeclaration],
    *,
    decoupled: bool = False,
) -> Any:
    """Add a model's tensors and transaction policy to its configuration.

    Tensors that the user declares are kept; ``max_batch_size`` becomes 0.
    """
    add_tensors(config, inputs, outputs)
    config.set_max_batch_size(0)
    config.set_model_transaction_policy({"decoupled": decoupled})
    return config


def add_tensors(
    config: Any, inputs: Sequence[TensorDeclaration], outputs: Sequence[TensorDeclaration]
) -> Any:
    """Add a model's tensors to its configuration; tensors that the user declares are kept."""
    declared = config.as_dict()
    for specs, key, add in (
        (inputs, "input", config.add_input),
        ([spec._replace(optional=False) for spec in outputs], "output", config.add_output),
    ):
        names = {tensor["name"] for tensor in declared[key]}
        for spec in specs:
            if spec.name not in names:
                add(spec.as_config())
    return config


def read_tensors(request: Any, specs: Iterable[TensorDeclaration]) -> dict[str, Array]:
    """Return the tensors of a request by name, without those that the client did not send.

    Raises:
        InvalidRequest: a tensor is missing that is not optional. The server notices that only if
            the model's configuration says so, too.
    """
    tensors: dict[str, Array] = {}
    for spec in specs:
        tensor = pb_utils.get_input_tensor_by_name(request, spec.name)
        if tensor is not None:
            tensors[spec.name] = tensor.as_numpy()
        elif not spec.optional:
            raise InvalidRequest(spec.name, "is missing")
    return tensors


def read_parameters(request: Any) -> str:
    """Return the parameters of a request, a JSON object or an empty string.

    Raises:
        InvalidRequest: they are not valid UTF-8, which is possible in a JSON body over HTTP.
    """
    try:
        parameters: str = request.parameters()
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            "parameters", f"must be valid UTF-8, which ends at byte {error.start}"
        ) from error
    return parameters


def new_tensors(arrays: Mapping[str, Array]) -> list[Any]:
    """Return Triton's tensors of these outputs."""
    return [pb_utils.Tensor(name, array) for name, array in arrays.items()]


def response(
    arrays: Mapping[str, Array],
    make_tensors: Callable[[Mapping[str, Array]], list[Any]] = new_tensors,
) -> Any:
    """Return a response with these outputs."""
    return pb_utils.InferenceResponse(output_tensors=make_tensors(arrays))


def error_response(error: Exception) -> Any:
    """Return an error response with Triton's code for the error."""
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(_message(error), _code(error)))


def respond(act: Callable[[], dict[str, Array]]) -> Any:
    """Return a response with the result of ``act``, or with its exception."""
    try:
        return response(act())
    except BaseException as error:  # leaving `execute` it would fail every request of the batch
        return error_response(as_exception(error))


def send_only(sender: Any, only: Any) -> None:
    """Send the only response to a request, and end the request."""
    sender.send(only, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def call(
    model: str, tensors: Mapping[str, Array], parameters: Mapping[str, Any] | None = None
) -> dict[str, Array]:
    """Call another model of this server that gives one response; returns its outputs.

    Raises:
        StepFailed: the model answers with an error.
    """
    return _outputs(_request(model, tensors, parameters).exec())


def stream(model: str, tensors: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
    """Call another model of this server; yields the outputs of each of its responses.

    Raises:
        StepFailed: the model answers with an error.
    """
    failure = None
    for answer in _request(model, tensors).exec(decoupled=True):
        try:
            outputs = _outputs(answer)
        except StepFailed as error:
            failure = error  # raised once the server has closed the request
        else:
            if outputs:  # otherwise it only ends the stream
                yield outputs
    if failure is not None:
        raise failure


def _request(
    model: str, tensors: Mapping[str, Array], parameters: Mapping[str, Any] | None = None
) -> Any:
    return pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=[],
        inputs=new_tensors(tensors),
        parameters=dict(parameters or {}),
    )


def _outputs(answer: Any) -> dict[str, Array]:
    if answer.has_error():
        raise StepFailed(answer.error().message(), _code_of_step(answer.error()))
    return {tensor.name(): tensor.as_numpy() for tensor in answer.output_tensors()}


def _code_of_step(error: Any) -> Any:
    """Return the code of another model's error.

    Servers at least up to 24.10 turn each code of a decoupled model into INTERNAL. All messages of
    our models say what they are, see ``paged_backend.values.errors``.
    """
    codes = pb_utils.TritonError
    reason, colon, _ = error.message().partition(": ")
    if error.code() != codes.INTERNAL:
        return error.code()
    if reason in (CANCELLED, "deadline"):
        return codes.CANCELLED
    if reason in _REFUSALS:
        return codes.UNAVAILABLE
    is_field = colon and reason != "crash_limit" and _FIELD.fullmatch(reason)
    return codes.INVALID_ARG if is_field else codes.INTERNAL


class StepFailed(PagedError):
    """An error of another model, which is passed on unchanged."""

    def __init__(self, message: str, code: Any) -> None:
        super().__init__(message)
        self.code = code


class TritonLogHandler(logging.Handler):
    """Writes lines to the server's log, with the backend's name in front as vllm_backend does."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self._prefix = f"[{backend}] "

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line at the server's level for it."""
        write = pb_utils.Logger.log_info
        if record.levelno >= logging.ERROR:
            write = pb_utils.Logger.log_error
        elif record.levelno >= logging.WARNING:
            write = pb_utils.Logger.log_warn
        write(self._prefix + record.getMessage())


def prepare_process() -> None:
    """Prepare a process of Triton for its first request.

    Other users cannot read what it shares with the server, and a crash writes its Python stack into
    the server's log.
    """
    close_to_other_users()
    faulthandler.enable()


def end_process() -> None:
    """Prepare a process of Triton for its end; call it last in ``finalize``.

    At least up to 24.10, Triton's part of the process crashes after that, which harms nothing.
    """
    faulthandler.disable()


@contextmanager
def refusing_to_load() -> Iterator[None]:
    """Turn an error in ``initialize`` into Triton's exception, and print the error to stderr.

    The server shows the exception within a stack trace, so that the line in the terminal is easier
    to find.
    """
    try:
        yield
    except PagedError as error:
        print(f"paged-backend: error: {error}", file=sys.stderr, flush=True)
        raise pb_utils.TritonModelException(str(error)) from None


# By name, as the stub that completes the configuration has no TritonError.
_CODES: list[tuple[type[Exception], str]] = [
    (InvalidRequest, "INVALID_ARG"),
    (Cancelled, "CANCELLED"),
    (DeadlineExceeded, "CANCELLED"),
    (RequestRefused, "UNAVAILABLE"),
    (EngineDead, "UNAVAILABLE"),
]


def _code(error: Exception) -> Any:
    if isinstance(error, StepFailed):
        return error.code
    names = (name for kind, name in _CODES if isinstance(error, kind))
    return getattr(pb_utils.TritonError, next(names, "INTERNAL"))


def _message(error: Exception) -> str:
    if isinstance(error, (PagedError, Cancelled)):
        return str(error)
    write_internal_error(error)
    return f"internal error ({type(error).__name__}); the server's log has more"

"""The messages between front-ends and the engine process: typed, validated, never pickled."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paged_backend.outputs import EngineStats, EngineView, SequenceOutput
from paged_backend.request import Request, RequestLimits

REQUESTS_SOCKET = "requests.sock"
OUTPUTS_SOCKET = "outputs.sock"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front-end is there and wants to hear when the engine can be used."""

    process: str  # a ProcessId
    counts: EngineStats | None  # the last it has heard, of an engine that has ended


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """A front-end leaves; its requests are aborted."""


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Start a request, or go on with one; its outputs go to the front-end that sent it."""

    request: Request
    # Tokens of each answer, None for one that has ended, of a request that an engine accepted
    # before this one; None for a new request, which may be refused.
    progress: list[list[int] | None] | None = None


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """End a request without any further output."""

    request_id: str


class StopCompletion(msgspec.Struct, frozen=True, tag=True):
    """End one answer of a request, whose text has come to a stop string."""

    request_id: str
    index: int


class CancelCall(msgspec.Struct, frozen=True, tag=True):
    """End the requests of a ``call_id``; the front ends that sent them get the last outputs.

    It is confirmed under the same ``request_id``.
    """

    request_id: str
    call_id: str


class ChargeTenant(msgspec.Struct, frozen=True, tag=True):
    """Count a call that the front end answers by itself against its tenant's rate."""

    tenant: str


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Tell what the engine holds; its answer carries the same id."""

    request_id: str


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    limits: RequestLimits
    model_folder: str
    description: str  # of the worker, for the log


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot go on; the message is for the operator."""

    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """All that a step produced for one front-end."""

    outputs: list[SequenceOutput]


class RequestRejected(msgspec.Struct, frozen=True, tag=True):
    """The engine found a request wrong that its front-end had let pass."""

    request_id: str
    message: str


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """The engine takes no such request now."""

    request_id: str
    reason: str
    problem: str


class CallCancelled(msgspec.Struct, frozen=True, tag=True):
    """The requests that a CancelCall has named have ended."""

    request_id: str


class TenantBlocked(msgspec.Struct, frozen=True, tag=True):
    """No call of this tenant is accepted for a while, so that front ends can refuse at once."""

    tenant: str
    wait_s: float


class Inspection(msgspec.Struct, frozen=True, tag=True):
    """The answer to Inspect."""

    request_id: str
    view: EngineView


class Stats(msgspec.Struct, frozen=True, tag=True):
    """The counts of this engine and those before, for the one front-end that reports them."""

    stats: EngineStats
    anew: bool  # this front-end begins, or begins again, to report


ToEngine = (
    Hello
    | Goodbye
    | AddRequest
    | AbortRequest
    | StopCompletion
    | CancelCall
    | ChargeTenant
    | Inspect
)
FromEngine = (
    EngineReady
    | EngineFailed
    | StepOutputs
    | RequestRejected
    | RequestRefused
    | CallCancelled
    | TenantBlocked
    | Inspection
    | Stats
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def address(run_dir: Path, name: str) -> str:
    """The socket's address below an engine's private folder."""
    return f"ipc://{run_dir / name}"

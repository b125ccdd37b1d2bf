"""The messages between front ends and the engine process: typed, validated, never pickled."""

from __future__ import annotations

from pathlib import Path

import msgspec

from paged_backend.values.lora import LoRARequest
from paged_backend.values.outputs import EngineStats, EngineView, SequenceOutput
from paged_backend.values.request import Request, RequestLimits
from paged_backend.values.sampling_defaults import SamplingDefaults

REQUESTS_SOCKET = "requests.sock"
OUTPUTS_SOCKET = "outputs.sock"


class Hello(msgspec.Struct, frozen=True, tag=True):
    """A front end has connected and waits for EngineReady."""

    process: str  # a ProcessId
    counts: EngineStats | None  # the last ones that it received from a previous engine


class Goodbye(msgspec.Struct, frozen=True, tag=True):
    """A front end disconnects; its requests are aborted."""


class AddRequest(msgspec.Struct, frozen=True, tag=True):
    """Start or resume a request; its outputs go to the front end that sent it."""

    request: Request
    # For a request from before this engine was ready: the tokens of each completion so far, None
    # for a completion that has ended. For any other request: None, and the engine may refuse it.
    progress: list[list[int] | None] | None = None


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """End a request without any further output."""

    request_id: str


class StopCompletion(msgspec.Struct, frozen=True, tag=True):
    """End one completion of a request, because its text reached a stop string."""

    request_id: str
    index: int


class CancelRequests(msgspec.Struct, frozen=True, tag=True):
    """End the requests of a ``call_id``; the front ends that sent them get last outputs.

    RequestsCancelled confirms it with the same ``request_id``.
    """

    request_id: str
    call_id: str


class ChargeTenant(msgspec.Struct, frozen=True, tag=True):
    """Count a request toward the rate of its tenant; the front end answers the request itself."""

    tenant: str


class LoadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Read and check an adapter that requests will name; AdapterChanged says whether it is good."""

    change_id: str
    lora: LoRARequest


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Forget an adapter when its last open request has ended, which AdapterChanged confirms.

    A new request that another front end had read before is refused then, unless the adapter was
    replaced by another one of its name: the request gets what its folder has now.
    """

    change_id: str
    lora: LoRARequest
    is_replaced: bool = False


class Inspect(msgspec.Struct, frozen=True, tag=True):
    """Ask for a view of the engine.

    The answer has the same id: Inspection, or RequestRejected if ``enable_inspect`` is off.
    """

    request_id: str


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    limits: RequestLimits
    sampling_defaults: SamplingDefaults
    tokenizer: str  # folder or GGUF file
    commits: dict[str, str]  # options that load the same files from the Hub again
    description: str  # description of the worker, for the log


class EngineFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; the message is for the operator."""

    message: str


class StepOutputs(msgspec.Struct, frozen=True, tag=True):
    """Everything that a step produced for one front end."""

    outputs: list[SequenceOutput]


class RequestRejected(msgspec.Struct, frozen=True, tag=True):
    """The engine found a request invalid that its front end accepted, or does not allow Inspect."""

    request_id: str
    message: str


class RequestDeclined(msgspec.Struct, frozen=True, tag=True):
    """The engine does not accept the request at present."""

    request_id: str
    reason: str
    problem: str


class RequestsCancelled(msgspec.Struct, frozen=True, tag=True):
    """All requests that a CancelRequests named have ended."""

    request_id: str


class AdapterChanged(msgspec.Struct, frozen=True, tag=True):
    """An engine has done what LoadAdapter or DropAdapter asked for; ``problem`` if it cannot."""

    change_id: str
    problem: str = ""


class TenantBlocked(msgspec.Struct, frozen=True, tag=True):
    """The engine accepts no request of a tenant for a while; front ends can refuse them at once."""

    tenant: str
    wait_s: float


class Inspection(msgspec.Struct, frozen=True, tag=True):
    """The answer to Inspect."""

    request_id: str
    view: EngineView


class Stats(msgspec.Struct, frozen=True, tag=True):
    """The counts of this engine and the ones before it, for the front end that reports metrics."""

    stats: EngineStats
    anew: bool  # the first Stats of this engine, or the first after a front end has left


ToEngine = (
    Hello
    | Goodbye
    | AddRequest
    | AbortRequest
    | StopCompletion
    | CancelRequests
    | ChargeTenant
    | LoadAdapter
    | DropAdapter
    | Inspect
)
FromEngine = (
    EngineReady
    | EngineFailed
    | StepOutputs
    | RequestRejected
    | RequestDeclined
    | RequestsCancelled
    | AdapterChanged
    | TenantBlocked
    | Inspection
    | Stats
)

encode = msgspec.msgpack.Encoder().encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode


def address(run_dir: Path, name: str) -> str:
    """Return the address of a socket in an engine's private folder."""
    return f"ipc://{run_dir / name}"

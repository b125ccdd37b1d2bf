"""What a request asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.parameters import RequestParameters
from paged_backend.serving.requests.prompts import EMBEDDING_REQUEST
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.validation import shorten


class TaskKind(StrEnum):
    """The tasks of requests, by the values of the tensor ``task``."""

    GENERATE = "generate"
    EMBED = "embed"
    SCORE = "score"
    CANCEL = "cancel"  # done by the front end
    LOAD_ADAPTER = "load_adapter"  # engines only read and check it
    UNLOAD_ADAPTER = "unload_adapter"
    INSPECT = "inspect"  # answered by the engine, which computes nothing for it
    TOKENIZE = "tokenize"
    DETOKENIZE = "detokenize"
    INFO = "info"

    @property
    def is_computed(self) -> bool:
        """Whether the engine computes steps for the task."""
        return self in (TaskKind.GENERATE, TaskKind.EMBED, TaskKind.SCORE)

    @property
    def is_charged(self) -> bool:
        """Whether a task for the tokenizer counts against its tenant's rate, as requests do."""
        return self in (TaskKind.TOKENIZE, TaskKind.DETOKENIZE)


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """What one request asks for.

    Attributes:
        kind: kind of the task.
        tensors: the request's input tensors.
        parameters: the request's parameters, which are not decoded yet.
        call_id: the name by which a request that is computed can be canceled, empty if it has
            none; or the name of the requests to cancel.
    """

    kind: TaskKind
    tensors: Tensors
    parameters: RequestParameters
    call_id: str = ""


def read_kind(tensors: Tensors) -> TaskKind:
    """Return the kind of task that a request asks for.

    Raises:
        InvalidRequest: the task is not known.
    """
    default = TaskKind.EMBED if EMBEDDING_REQUEST in tensors else TaskKind.GENERATE
    name = fields.string("task", tensors["task"]) if "task" in tensors else default
    if default is TaskKind.EMBED and name != TaskKind.EMBED:
        raise InvalidRequest("task", f"must be embed with {EMBEDDING_REQUEST}")
    known = list(TaskKind)
    if name not in known:
        raise InvalidRequest("task", f"must be one of {', '.join(known)}, got {shorten(name)}")
    return TaskKind(name)

"""What a request can ask for, and the answers that need the tokenizer only, not the engine."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

import numpy as np

from paged_backend.serving import fields
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.prompts import EMBEDDING_REQUEST, PromptReader
from paged_backend.serving.requests.tool_use import ToolUse
from paged_backend.text.detokenizer import text_of_prompt
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits
from paged_backend.values.sampling_defaults import SamplingDefaults
from paged_backend.values.validation import shorten

GENERATE = "generate"
EMBED = "embed"
SCORE = "score"
CANCEL = "cancel"  # done by the front end
INSPECT = "inspect"  # answered by the engine
CHARGED = ("tokenize", "detokenize")  # they count against a tenant's rate, as GENERATE does


@dataclass(frozen=True, slots=True)
class GenerateTask:
    """Generate tokens; the engine does it."""

    call_id: str | None  # the name that the client gave to the request, to cancel it


@dataclass(frozen=True, slots=True)
class EmbedTask:
    """Make an embedding; the engine does it."""

    call_id: str | None  # the name that the client gave to the request, to cancel it


@dataclass(frozen=True, slots=True)
class ScoreTask:
    """Score a pair of texts; the engine does it."""

    call_id: str | None  # the name that the client gave to the request, to cancel it


@dataclass(frozen=True, slots=True)
class CancelTask:
    """Cancel all requests with the name ``call_id``; the front end and the engine do it."""

    call_id: str


@dataclass(frozen=True, slots=True)
class InspectTask:
    """Show the engine's sequences; the engine does it."""


@dataclass(frozen=True, slots=True)
class TokenizerTask:
    """A task that :class:`TaskReader` answers."""

    name: str
    is_charged: bool  # it counts against the tenant's rate


Task = GenerateTask | EmbedTask | ScoreTask | CancelTask | InspectTask | TokenizerTask


class TaskReader:
    """Reads the task of a request, and answers the tasks that need the tokenizer only.

    These are all tasks except ``generate``, ``embed``, ``score``, ``cancel`` and ``inspect``.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        prompts: PromptReader,
        tool_use: ToolUse,
        defaults: SamplingDefaults,
    ) -> None:
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._limits = limits
        self._prompts = prompts
        self._tool_use = tool_use
        self._tasks = {
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "info": self._info,
        }

    def name(self, tensors: Tensors) -> str:
        """Return the name of the task that a request asks for.

        Raises:
            InvalidRequest: the task is not known.
        """
        default = EMBED if EMBEDDING_REQUEST in tensors else GENERATE
        task = fields.string("task", tensors["task"]) if "task" in tensors else default
        if default == EMBED and task != EMBED:
            raise InvalidRequest("task", f"must be embed with {EMBEDDING_REQUEST}")
        known = [GENERATE, EMBED, SCORE, CANCEL, INSPECT, *self._tasks]
        if task not in known:
            raise InvalidRequest("task", f"must be one of {', '.join(known)}, got {shorten(task)}")
        return task

    def answer(self, task: TokenizerTask, tensors: Tensors) -> dict[str, Array]:
        """Return the output tensors of a task that needs the tokenizer only.

        Raises:
            InvalidRequest: the prompt cannot be used.
        """
        return self._tasks[task.name](tensors)

    def _tokenize(self, tensors: Tensors) -> dict[str, Array]:
        # A prompt has the tools that it would have for the task ``generate``.
        tools = self._tool_use.read(tensors)
        token_ids = self._prompts.read(tensors, tools.definitions).token_ids
        self._limits.check_token_ids("input_ids", token_ids)
        return {
            "output_ids": np.array(token_ids, np.int32),
            "num_input_tokens": np.asarray(len(token_ids), np.uint32),
        }

    def _detokenize(self, tensors: Tensors) -> dict[str, Array]:
        if "input_ids" not in tensors:
            raise InvalidRequest("input_ids", "is missing")
        token_ids = fields.elements("input_ids", tensors["input_ids"])
        self._limits.check_token_ids("input_ids", token_ids)
        if fields.flag(tensors, "stream"):  # more text follows
            text = text_of_prompt(self._tokenizer, token_ids, skip_special_tokens=False)
        else:
            text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return {"text_output": as_strings([text])}

    def _info(self, tensors: Tensors) -> dict[str, Array]:
        del tensors
        info = {
            **asdict(self._limits),
            "sampling_defaults": asdict(self._defaults),
            "has_chat_template": self._tokenizer.chat_template is not None,
        }
        return {"text_output": as_strings([json.dumps(info)])}

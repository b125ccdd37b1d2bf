"""Answers calls that need the tokenizer only, without the engine."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np

from paged_backend.errors import InvalidRequest
from paged_backend.request import RequestLimits
from paged_backend.serving import fields
from paged_backend.serving.calls.prompts import PromptReader
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.validation import shorten

GENERATE = "generate"
CANCEL = "cancel"  # done by the front end
INSPECT = "inspect"  # answered by the engine
CHARGED = ("tokenize", "detokenize")  # tasks that count against a tenant's rate, as requests do


class TaskReader:
    """Reads the task of a call, and answers the tasks that need the tokenizer only.

    These are all tasks except ``generate``, ``cancel`` and ``inspect``.
    """

    def __init__(self, tokenizer: Tokenizer, limits: RequestLimits, prompts: PromptReader) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._prompts = prompts
        self._tasks = {
            "tokenize": self._tokenize,
            "detokenize": self._detokenize,
            "info": self._info,
        }

    def name(self, tensors: Tensors) -> str:
        """Return the name of the task that a call asks for.

        Raises:
            InvalidRequest: the task is not known.
        """
        if "task" not in tensors:
            return GENERATE
        task = fields.string("task", tensors["task"])
        known = [GENERATE, CANCEL, INSPECT, *self._tasks]
        if task not in known:
            raise InvalidRequest("task", f"must be one of {', '.join(known)}, got {shorten(task)}")
        return task

    def answer(self, task: str, tensors: Tensors) -> dict[str, Array]:
        """Return the output tensors of a task that needs no engine.

        Raises:
            InvalidRequest: the prompt cannot be used.
        """
        return self._tasks[task](tensors)

    def _tokenize(self, tensors: Tensors) -> dict[str, Array]:
        token_ids = self._prompts.read(tensors).token_ids
        self._check(token_ids)
        return {
            "output_ids": np.array(token_ids, np.int32),
            "num_input_tokens": np.asarray(len(token_ids), np.uint32),
        }

    def _detokenize(self, tensors: Tensors) -> dict[str, Array]:
        if "input_ids" not in tensors:
            raise InvalidRequest("input_ids", "is missing")
        token_ids = fields.elements("input_ids", tensors["input_ids"])
        self._check(token_ids)
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return {"text_output": as_strings([text])}

    def _check(self, token_ids: list[int]) -> None:
        low, high = min(token_ids, default=0), max(token_ids, default=0)
        if low < 0 or high >= self._limits.vocab_size:
            bad = low if low < 0 else high
            raise InvalidRequest(
                "input_ids", f"must be from 0 to {self._limits.vocab_size - 1}, got {bad}"
            )

    def _info(self, tensors: Tensors) -> dict[str, Array]:
        del tensors
        info = {
            **asdict(self._limits),
            "has_chat_template": self._tokenizer.chat_template is not None,
        }
        return {"text_output": as_strings([json.dumps(info)])}

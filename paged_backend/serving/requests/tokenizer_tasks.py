"""The answers to tasks that need the tokenizer only, not the engine."""

from __future__ import annotations

import json
from dataclasses import asdict

import numpy as np

from paged_backend.process.adapter_names import AdapterNames
from paged_backend.serving import fields
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.prompts import PromptReader
from paged_backend.serving.requests.tasks import Task, TaskKind
from paged_backend.serving.requests.tool_use import ToolUse
from paged_backend.text.detokenizer import text_of_prompt
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits
from paged_backend.values.sampling_defaults import SamplingDefaults


class TokenizerTasks:
    """Answers the tasks ``tokenize``, ``detokenize`` and ``info`` for one model.

    Args:
        tokenizer: tokenizer of the model.
        limits: limits of requests.
        prompts: reads prompts.
        tool_use: reads tools.
        defaults: parameters of requests that leave them out.
        names: knows the LoRA adapters, if there are any.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        prompts: PromptReader,
        tool_use: ToolUse,
        defaults: SamplingDefaults,
        names: AdapterNames | None,
    ) -> None:
        self._names = names
        self._defaults = defaults
        self._tokenizer = tokenizer
        self._limits = limits
        self._prompts = prompts
        self._tool_use = tool_use
        self._answers = {
            TaskKind.TOKENIZE: self._tokenize,
            TaskKind.DETOKENIZE: self._detokenize,
            TaskKind.INFO: self._info,
        }

    def answer(self, task: Task) -> dict[str, Array]:
        """Return the output tensors of a task.

        Raises:
            InvalidRequest: the prompt cannot be used.
        """
        return self._answers[task.kind](task.tensors)

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
        known = {} if self._names is None else self._names.known
        info = {
            **asdict(self._limits),
            "sampling_defaults": asdict(self._defaults),
            "has_chat_template": self._tokenizer.chat_template is not None,
            "adapters": {name: lora.lora_path for name, lora in known.items()},
        }
        return {"text_output": as_strings([json.dumps(info)])}

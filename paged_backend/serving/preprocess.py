"""The first step of the pipeline: text or messages become token ids and JSON parameters."""

from __future__ import annotations

import contextlib
import json
import uuid
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from paged_backend.serving import triton
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.pipeline import Llm, PassThrough, load_llm
from paged_backend.serving.requests.parameters import tenant_of
from paged_backend.serving.requests.preparation import Load, Preparation
from paged_backend.serving.requests.prompts import SOURCES
from paged_backend.values import contract
from paged_backend.values.contract import named
from paged_backend.values.errors import InvalidRequest, RequestRefused

INPUTS = named(
    contract.INPUTS,
    *SOURCES,
    *("add_special_tokens", "stream", "exclude_input_in_output"),
    *("sampling_parameters", "stop", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("return_finish_reason", "return_num_output_tokens", "return_output_ids"),
    *contract.TOOL_INPUTS,
)

_FOR_MODEL = named(contract.INPUTS, "input_ids", "stream", "sampling_parameters")
_NOTES = named(contract.INPUTS, "call_id", "pass_through")
# What the last step always needs; that step puts the prompt before the text.
_ALWAYS_SET = named(
    contract.INPUTS,
    *("exclude_input_in_output", "return_context_ids", "return_finish_reason"),
    *("return_num_output_tokens", "return_output_ids"),
)
MAX_WAITING = 1024  # requests that wait to be prepared; more are refused
OUTPUTS = (*_FOR_MODEL, *_NOTES, *_ALWAYS_SET)  # all of them are inputs of the model


class TritonPythonModel:
    """The first step, for clients that use this package's tensor names."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the tensors."""
        return triton.complete_config(config, INPUTS, OUTPUTS)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer of the pipeline's model."""
        self._llm = load_llm(args)
        self._llm.tokenizer.prepare_chat()
        self._preparation = Preparation(self._llm.config.max_waiting_tokens)

    def execute(self, requests: list[Any]) -> None:
        """Prepare small requests at once, and the others on threads."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                if self._preparation.num_waiting >= MAX_WAITING:
                    problem = f"{MAX_WAITING} requests wait to be prepared; retry after 1 s"
                    raise RequestRefused("queue_full", problem)
                tensors = triton.read_tensors(request, INPUTS)
                parameters = triton.read_parameters(request)
                work = partial(self._answer, tensors, parameters, sender)
                is_slow = self._llm.parser.prompts.is_slow
                load = replace(Load.of(tensors, parameters), is_slow=is_slow)
                tenant = "" if load.is_small else tenant_of(tensors, parameters)
                self._preparation.run(load, work, tenant)
            # An exception that leaves this method would fail every request of the batch.
            except Exception as error:
                triton.send_only(sender, triton.error_response(error))

    def finalize(self) -> None:
        """Answer the waiting requests."""
        self._preparation.close()
        self._llm.leave()

    def _answer(self, tensors: Tensors, parameters: str, sender: Any) -> None:
        act = partial(prepare, self._llm, tensors, parameters)
        with contextlib.suppress(Exception):  # the server may have ended the request already
            triton.send_only(sender, triton.respond(act))


def prepare(llm: Llm, tensors: Tensors, parameters: str = "") -> dict[str, Array]:
    """Check a request, and return the model's inputs for it.

    The model makes the same checks. They are made here too because tritonserver 24.10 does not
    always recover from an error of a decoupled step in an ensemble: it then takes half a minute to
    stop.

    Raises:
        InvalidRequest: a field is wrong; the error names it and the allowed range.
    """
    task = llm.parser.read(tensors, parameters)
    call_id = task.call_id or uuid.uuid4().hex
    parsed = llm.parser.parse(call_id, task)
    prompt_token_ids = parsed.request.prompt_token_ids
    passed = PassThrough(
        call_id=call_id,
        prompt=parsed.prompt_text,
        wanted=tuple(sorted(parsed.options.wanted)),
        params=parsed.request.params,
        tenant=parsed.request.tenant,
    ).as_tensor()
    try:
        llm.parser.check_pass_through(passed, stream=parsed.options.stream)
    except InvalidRequest as error:  # only stop strings can be long
        raise error.renamed("stop") from error
    return {
        "input_ids": np.array(prompt_token_ids, np.int32),
        "stream": np.array([parsed.options.stream]),
        "sampling_parameters": as_strings([json.dumps(task.parameters.sampling)]),
        "call_id": as_strings([call_id]),
        "pass_through": passed,
        **dict.fromkeys((spec.name for spec in _ALWAYS_SET), np.array([True])),
    }

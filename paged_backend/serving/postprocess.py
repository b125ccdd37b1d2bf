"""The last step of the pipeline: token ids become text; it is stateless."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from paged_backend.serving import fields, triton
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.pipeline import Llm, PassThrough, load_llm
from paged_backend.serving.requests.tool_use import PARSED
from paged_backend.serving.rotation import MAX_CHARACTERS_AT_ONCE, MAX_IDS_AT_ONCE, Rotation
from paged_backend.serving.text_sizes import check_sizes, num_characters, num_ids
from paged_backend.text.text_stream import MAX_CONTEXT_IDS, Stops, StreamState, resumed_delta
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values import contract
from paged_backend.values.contract import TensorDeclaration, named
from paged_backend.values.errors import InvalidRequest, as_exception
from paged_backend.values.outputs import FinishReason

INPUTS = tuple(
    spec._replace(optional=False)
    for spec in named(
        contract.OUTPUTS,
        *("output_ids", "num_output_tokens", "finish_reason", "sequence_length"),
        *("context_ids", "num_context_ids", "num_held_ids", "pass_through"),
    )
)
_PARSED = TensorDeclaration(contract.PARSED_TEXT, "TYPE_STRING", -1)  # text output of the model
_PASSED_ON = ("finish_reason", "num_output_tokens", "output_ids")
OUTPUTS = named(contract.OUTPUTS, "text_output", *_PASSED_ON)
_BY_COMPLETION = ("num_held_ids", "sequence_length", "num_context_ids", "num_output_tokens")
_LOOK_S = 0.001  # between checks for cancellation, which take as long as the rest of a request


class TritonPythonModel:
    """The last step, for clients that use this package's tensor names."""

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """Add the tensors."""
        return triton.complete_config(config, (*INPUTS, _PARSED), OUTPUTS)

    def initialize(self, args: dict[str, str]) -> None:
        """Load the tokenizer of the pipeline's model."""
        self._llm = load_llm(args)
        self._leavers = Leavers(self._llm)
        self._rotation = Rotation("paged-long-texts")

    def finalize(self) -> None:
        """Answer what is open, and end properly."""
        self._rotation.close()
        self._llm.leave()

    def execute(self, requests: list[Any]) -> None:
        """Answer short requests at once, and long ones on another thread."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                tensors = triton.read_tensors(request, (*INPUTS, _PARSED))
                passed = PassThrough.from_tensor(tensors["pass_through"])
                self._leavers.look(request, passed)
                check_sizes(tensors, passed.prompt, passed.wanted)
                turn = (passed.tenant, passed.call_id)
                work = self._work(request, tensors, passed, sender)
                # The pieces of a stream stay in order: one that is long holds back the next.
                if _is_long(tensors, passed) or self._rotation.has(*turn):
                    self._rotation.put(*turn, work)
                else:
                    deque(work, maxlen=0)
            # An exception that leaves this method would fail every request of the batch.
            except Exception as error:
                triton.send_only(sender, triton.error_response(error))

    def _work(
        self, request: Any, tensors: Tensors, passed: PassThrough, sender: Any
    ) -> Iterator[None]:
        """Answer a request, a completion at a time. The server keeps its tensors as long."""
        texts: list[str] = []
        try:
            if num_ids(tensors) > MAX_IDS_AT_ONCE:
                check_lengths(tensors, self._llm.limits.max_model_len)
            for text in self._texts(tensors, passed):
                texts.append(text)
                yield
            answer = triton.response(_outputs(tensors, passed, texts))
        except BaseException as error:  # a tokenizer's may be no Exception
            answer = triton.error_response(as_exception(error))
        with contextlib.suppress(Exception):  # the server may have ended the request already
            triton.send_only(sender, answer)

    def _texts(self, tensors: Tensors, passed: PassThrough) -> Iterable[str]:
        if PARSED.isdisjoint(passed.wanted):
            return new_texts(self._llm.tokenizer, tensors, passed)
        # Only the model knows what is reasoning and what is a tool call.
        parsed = fields.strings(contract.PARSED_TEXT, tensors[contract.PARSED_TEXT])
        return (passed.prompt + text for text in parsed)


def _outputs(tensors: Tensors, passed: PassThrough, texts: list[str]) -> dict[str, Array]:
    passed_on = {name: tensors[name] for name in _PASSED_ON if name in passed.wanted}
    return {"text_output": as_strings(texts), **passed_on}


def _is_long(tensors: Tensors, passed: PassThrough) -> bool:
    if num_ids(tensors) > MAX_IDS_AT_ONCE:
        return True
    return num_characters(tensors, passed.prompt) > MAX_CHARACTERS_AT_ONCE


class Leavers:
    """Cancels the requests of clients that have disconnected.

    When a client of an ensemble disconnects, the server tells only the steps that start after that.
    The model has started before, so this step tells it.
    """

    def __init__(self, llm: Llm) -> None:
        self._llm = llm
        self._looked = 0.0
        # On another thread, as the model may wait for this step before it accepts a request.
        self._worker = ThreadPoolExecutor(1)

    def look(self, request: Any, passed: PassThrough) -> None:
        """Cancel the request if its client has disconnected; rate-limited."""
        now = time.monotonic()
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        if request.is_cancelled():
            self._worker.submit(self._llm.cancel, passed.call_id)


def new_texts(tokenizer: Tokenizer, tensors: Tensors, passed: PassThrough) -> Iterator[str]:
    """Return the new text of each completion, after the prompt's text if that is echoed.

    Raises:
        InvalidRequest: a count does not match its tensor or is too large, a token id is negative,
            or a finish reason is unknown.
    """
    number = tensors["finish_reason"].size
    for name in _BY_COMPLETION:
        if tensors[name].size != number:
            raise InvalidRequest(
                name, f"has {tensors[name].size} elements for {number} completions"
            )
    if (tensors["num_context_ids"] > MAX_CONTEXT_IDS).any():
        raise InvalidRequest("num_context_ids", f"must be at most {MAX_CONTEXT_IDS}")
    reasons = fields.strings("finish_reason", tensors["finish_reason"])
    states = zip(
        _split(tensors, "context_ids", "num_context_ids"),
        tensors["num_held_ids"].tolist(),
        tensors["sequence_length"].tolist(),
        strict=True,
    )
    ids = _split(tensors, "output_ids", "num_output_tokens")
    stops = Stops(tokenizer, passed.params)
    for new_ids, (context_ids, num_held, length), reason in zip(ids, states, reasons, strict=True):
        if num_held > len(context_ids):
            raise InvalidRequest("num_held_ids", f"must be at most {len(context_ids)}")
        if length < len(new_ids):
            raise InvalidRequest("sequence_length", f"must be at least {len(new_ids)}")
        state = StreamState(context_ids, num_held, length - len(new_ids))
        finish_reason = _finish_reason(reason)
        delta = resumed_delta(tokenizer, passed.params, state, new_ids, finish_reason, stops)
        yield passed.prompt + delta.text


def check_lengths(tensors: Tensors, max_model_len: int) -> None:
    """Refuse more tokens of a completion than the model can generate.

    Raises:
        InvalidRequest: naming the number.
    """
    longest = tensors["num_output_tokens"].max(initial=0)
    if longest > max_model_len:
        raise InvalidRequest(
            "num_output_tokens", f"must be at most {max_model_len} (max_model_len), got {longest}"
        )


def _finish_reason(name: str) -> FinishReason | None:
    try:
        return None if name == "None" else FinishReason(name)
    except ValueError as error:
        known = ", ".join(["None", *FinishReason])
        raise InvalidRequest("finish_reason", f"must be one of {known}") from error


def _split(tensors: Tensors, name: str, counts: str) -> list[list[int]]:
    """Split a flat tensor into the parts of the completions."""
    sizes = tensors[counts].reshape(-1)
    if (tensors[name] < 0).any():
        raise InvalidRequest(name, "must be at least 0")
    if sizes.sum() != tensors[name].size:
        raise InvalidRequest(name, f"has {tensors[name].size} elements, {counts} says otherwise")
    return [part.tolist() for part in np.split(tensors[name], np.cumsum(sizes)[:-1])]

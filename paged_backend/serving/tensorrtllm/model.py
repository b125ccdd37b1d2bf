"""What the models with tensorrtllm_backend's tensors share.

Each of them is another front end of the engine of the pipeline's model, like an instance of that
model.
"""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import triton_python_backend_utils as pb_utils

from paged_backend.serving import fields, model, triton
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.deployment import Deployment
from paged_backend.serving.fields import Tensors
from paged_backend.serving.model import TritonSender
from paged_backend.serving.pipeline import llm_version
from paged_backend.serving.requests.open_requests import IncomingRequest
from paged_backend.serving.requests.parsing import LOGITS
from paged_backend.serving.tensorrtllm.arrays import Outputs, is_batched, split_rows
from paged_backend.serving.tensorrtllm.batch import BatchResponses, RowSender
from paged_backend.serving.tensorrtllm.beams import Beams
from paged_backend.serving.tensorrtllm.completions import Completions, Wishes
from paged_backend.serving.tensorrtllm.lora import brought_adapter
from paged_backend.serving.tensorrtllm.sampling import (
    Dialect,
    check_bias_words,
    renamed,
    sampling_values,
    with_newer_names,
)
from paged_backend.values.contract import TensorDeclaration
from paged_backend.values.errors import InvalidRequest

# Parameters of a request that its clients set, and that have no effect.
_PARAMETERS = ("Streaming",)
MAX_PARAMETERS = 2**14  # characters of all parameters, of which there are few


@dataclass(frozen=True, slots=True)
class RowRequest:
    """What a client asks for in one row, in the words of one interface."""

    dialect: Dialect
    tensors: Tensors  # under the names of the dialect
    prompt: Mapping[str, Array]  # the model's inputs for it
    # Makes the client's outputs of the model's outputs for a completion, or for all beams, and the
    # common outputs.
    convert: Callable[[Outputs, Outputs], Outputs]
    asked_for: Sequence[str] = ()  # outputs of the model that ``convert`` needs


class BatchModel(model.TritonPythonModel):
    """A front end for clients with tensorrtllm_backend's tensors.

    The model's configuration decides about two things. With ``max_batch_size: 0`` the tensors have
    no batch dimension. Without the decoupled policy a request has one response, which holds the
    answers to all rows.
    """

    inputs: ClassVar[tuple[TensorDeclaration, ...]]
    outputs: ClassVar[tuple[TensorDeclaration, ...]]
    stream_flag: ClassVar[str]

    @classmethod
    def auto_complete_config(cls, config: Any) -> Any:
        """Add the tensors."""
        return triton.add_tensors(config, cls.inputs, cls.outputs)

    def initialize(self, args: dict[str, str]) -> None:
        """Connect to the engine as an instance of the pipeline's model does."""
        self._is_batched = is_batched(args)
        self._is_decoupled = pb_utils.using_decoupled_model_transaction_policy(
            json.loads(args["model_config"])
        )
        with triton.refusing_to_load():
            version = llm_version(args)
        own = Deployment.from_args(args)
        self._open(replace(own, name=version.parent.name, version=version.name, folder=version))

    @abstractmethod
    def _row(self, tensors: Tensors, *, is_stream: bool) -> RowRequest:
        """Return what a row asks for.

        Raises:
            InvalidRequest: a field cannot be used.
        """

    def _incoming_requests(self, request: Any, sender: TritonSender) -> list[IncomingRequest]:
        parameters = triton.read_parameters(request)
        if len(parameters) > MAX_PARAMETERS:
            raise InvalidRequest("parameters", f"has over {MAX_PARAMETERS} characters")
        for name in json.loads(parameters or "{}"):
            if not name.startswith("triton_") and name not in _PARAMETERS:
                raise InvalidRequest(name, "is not known")
        rows = split_rows(triton.read_tensors(request, self.inputs), is_batched=self._is_batched)
        rows = list(map(with_newer_names, rows))
        is_stream = self._is_stream(rows)
        batch = BatchResponses(
            sender, len(rows), is_stream=is_stream, is_decoupled=self._is_decoupled
        )
        read = [self._row(tensors, is_stream=is_stream) for tensors in rows]
        check_bias_words(row.tensors for row in read)
        incoming = [
            self._incoming_request(request, batch, index, row, is_stream)
            for index, row in enumerate(read)
        ]
        # The answers to all rows may be one response.
        is_large = any(fields.flag(row, f"return_{name}") for row in rows for name in LOGITS)
        for row_request in incoming:
            row_request.is_large = is_large
        return incoming

    def _is_stream(self, rows: Sequence[Tensors]) -> bool:
        flags = {fields.flag(row, self.stream_flag) for row in rows}
        if len(flags) > 1:
            raise InvalidRequest(self.stream_flag, "must be the same in all rows of a batch")
        if True in flags and not self._is_decoupled:
            raise InvalidRequest(
                self.stream_flag, "cannot be true: the model's policy is not decoupled"
            )
        return True in flags

    def _incoming_request(
        self, request: Any, batch: BatchResponses, index: int, row: RowRequest, is_stream: bool
    ) -> IncomingRequest:
        values = sampling_values(row.dialect, row.tensors, self._loaded)
        wishes = Wishes.of(row.tensors, is_stream=is_stream)
        kind = Beams if values.get("beam_width", 1) > 1 else Completions
        outputs = kind(wishes, self._loaded.config.block_size)
        inputs = {
            **row.prompt,
            "stream": np.array([is_stream]),
            "sampling_parameters": as_strings([json.dumps(values)]),
            **{f"return_{name}": np.array([True]) for name in {*wishes.needed, *row.asked_for}},
        }
        if request.request_id():
            inputs["call_id"] = as_strings([call_id(request.request_id())])

        def convert(answer: Outputs) -> Iterator[Outputs]:
            return (row.convert(*found) for found in outputs.split(answer))

        rename = partial(renamed, dialect=row.dialect, tensors=row.tensors)
        sender = RowSender(batch, index, convert, rename)
        limit = self._loaded.config.max_request_lora_bytes
        adapter = brought_adapter(row.tensors, limit)
        timeout_s = model.timeout_s(request)
        return IncomingRequest(inputs, "", timeout_s, sender, adapter=adapter)


def call_id(request_id: str) -> str:
    """Return the name by which the engine knows the requests with a client's request id."""
    return hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()

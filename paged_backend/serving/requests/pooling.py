"""Requests for embeddings and scores: how they are read, and how they are answered."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from paged_backend.embeddings.vectors import make_embedding, read_score
from paged_backend.serving import fields
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.cancellation import Cancelled
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.serving.requests.prompts import (
    EMBEDDING_REQUEST,
    SOURCES,
    TEXT,
    TEXT_PAIR,
    Prompt,
)
from paged_backend.serving.requests.tasks import Task, TaskKind
from paged_backend.values.contract import INPUTS
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.outputs import SequenceOutput
from paged_backend.values.pooling_params import PoolingParams
from paged_backend.values.request import Request, RequestOptions
from paged_backend.values.validation import check_known, shorten

_COUNTS = ("num_input_tokens", "num_output_tokens", "num_cached_tokens")
_USED = {
    *("task", "sampling_parameters", "call_id", "pass_through"),
    *(f"return_{name}" for name in _COUNTS),
}
_PROMPTS = {*SOURCES, EMBEDDING_REQUEST, "add_special_tokens"}
_PAIR = {TEXT, TEXT_PAIR}
_FLAGS = {spec.name for spec in INPUTS if spec.data_type == "TYPE_BOOL"}


@dataclass(frozen=True, slots=True)
class ParsedPooling:
    """Everything that one request for an embedding or a score asks for."""

    request: Request
    wanted: frozenset[str]  # X for each `return_X` that is set
    scores: bool  # the request is for a score
    as_json: bool  # vllm_backend's clients get the embedding as text
    normalize: bool
    pass_through: Array | None  # to be given back as it is
    timeout_s: float | None


def parse_pooling(
    parser: RequestParser, request_id: str, task: Task, admit: Callable[[str], None]
) -> ParsedPooling:
    """Check one request for an embedding or a score.

    Args:
        parser: checks requests against the loaded model.
        request_id: the id by which the engine will know it.
        task: what it asks for.
        admit: called with the tenant before the prompt is tokenized; it may raise.

    Raises:
        InvalidRequest: naming the field and the allowed range.
    """
    limits, tensors = parser.limits, task.tensors
    scores = task.kind is TaskKind.SCORE
    subject = "scores" if scores else "embeddings"
    as_json = EMBEDDING_REQUEST in tensors
    if as_json and not limits.makes_embeddings:
        raise InvalidRequest(EMBEDDING_REQUEST, "cannot be used: the model makes no embeddings")
    if scores:
        limits.check_scores()
    else:
        limits.check_embeds()
    _check_tensors(tensors, subject, _PAIR if scores else _PROMPTS)
    values = dict(task.parameters.sampling)
    own = RequestOptions.take_from(values)
    for name, is_given in (
        ("thinking_token_budget", own.thinking_token_budget is not None),
        ("cache_hit_threshold", own.cache_hit_threshold > 0),
        ("speculate", not own.speculate),
        ("prediction", bool(own.prediction)),
    ):
        if is_given:
            raise InvalidRequest(name, f"cannot be used with {subject}")
    admit(own.tenant)
    if scores:
        prompt = parser.prompts.read_pair(tensors)
    elif as_json:
        prompt, dimensions = _read_json(parser, tensors)
        if dimensions is not None:
            values["dimensions"] = dimensions
    else:
        prompt = parser.prompts.read(tensors)
    pooling = PoolingParams.from_mapping(values)
    if scores:
        limits.check_pair(prompt.token_ids)
    else:
        limits.check_embedding(prompt.token_ids, pooling)
    if scores and pooling.dimensions is not None:
        raise InvalidRequest("dimensions", "cannot be used with scores")
    pass_through = tensors.get("pass_through")
    if pass_through is not None:
        parser.check_pass_through(pass_through, stream=False)
    request = Request(
        request_id,
        prompt.token_ids,
        cache_salt=own.cache_salt,
        priority=own.priority,
        tenant=own.tenant,
        call_id=task.call_id,
        pooling=pooling,
    )
    wanted = frozenset(name for name in _COUNTS if fields.flag(tensors, f"return_{name}"))
    return ParsedPooling(
        request, wanted, scores, as_json, limits.normalize, pass_through, own.timeout_s
    )


def _check_tensors(tensors: Tensors, subject: str, prompts: Collection[str]) -> None:
    """Refuse tensors that mean nothing for the subject; flags may be there if they are false."""
    for name in tensors:
        # A score always has special tokens, so a client may not turn them off.
        is_off = name in _FLAGS and name != "add_special_tokens" and not fields.flag(tensors, name)
        if name not in _USED and name not in prompts and not is_off:
            raise InvalidRequest(name, f"cannot be used with {subject}")
    for name in SOURCES:
        if name in tensors and EMBEDDING_REQUEST in tensors:
            raise InvalidRequest(name, f"cannot be used with {EMBEDDING_REQUEST}")


def _read_json(parser: RequestParser, tensors: Tensors) -> tuple[Prompt, Any]:
    """Return the prompt and the dimensions in vllm_backend's tensor."""
    name = EMBEDDING_REQUEST
    source = fields.string(name, tensors[name])
    values = fields.json_object(name, source, parser.limits.max_json_depth)
    check_known(values, ("input", "pooling_params"), _problem)
    params = values.get("pooling_params", {})
    if not isinstance(params, dict):
        raise _problem("pooling_params", f"must be an object, got {shorten(params)}")
    check_known(params, ("dimensions",), _problem)
    dimensions = params.get("dimensions")
    if isinstance(dimensions, list) and len(dimensions) == 1:
        dimensions = dimensions[0]
    prompt = values.get("input")
    if isinstance(prompt, str):
        return parser.prompts.encode("input", prompt), dimensions
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise _problem("input", f"must be a string or token ids, got {shorten(prompt)}")
    return Prompt(prompt, None), dimensions


def _problem(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(EMBEDDING_REQUEST, f"{field} {problem}")


class PoolingAnswer:
    """Waits for an embedding or a score, which is sent as one response."""

    def __init__(self, parsed: ParsedPooling) -> None:
        self.request = parsed.request
        self._parsed = parsed
        self._end: SequenceOutput | None = None

    def append(self, output: SequenceOutput) -> bool:
        """Take the output of the engine; False, as no text can end the request early."""
        self._end = output
        return False

    @property
    def is_finished(self) -> bool:
        """Return True if the engine has ended the request."""
        return self._end is not None

    @property
    def is_due(self) -> bool:
        """Return True if the response should be sent now."""
        return self.is_finished

    @property
    def progress(self) -> list[list[int] | None]:
        """Nothing was generated: the next engine computes the prompt again."""
        return [[]]

    @property
    def is_large(self) -> bool:
        """False: an embedding has as many numbers as the model has."""
        return False

    def take_later(self) -> Callable[[], dict[str, Array]]:
        """Return ``take``."""
        return self.take

    def take(self) -> dict[str, Array]:
        """Return the output tensors of the response.

        Raises:
            Cancelled: the request was canceled by its name.
        """
        assert self._end is not None
        assert self.request.pooling is not None
        if self._end.pooled is None:
            raise Cancelled()
        tensors = self._result(self._end.pooled, self.request.pooling)
        counts = {
            "num_input_tokens": np.asarray(len(self.request.prompt_token_ids), np.uint32),
            "num_output_tokens": np.asarray(0, np.uint32),
            "num_cached_tokens": np.array([self._end.num_cached_tokens], np.uint32),
        }
        tensors |= {name: counts[name] for name in self._parsed.wanted}
        if self._parsed.pass_through is not None:
            tensors["pass_through"] = self._parsed.pass_through
        return tensors

    def _result(self, pooled: bytes, params: PoolingParams) -> dict[str, Array]:
        """Return the output tensor that the request is for."""
        if self._parsed.scores:
            return {"score": np.array([read_score(pooled)], np.float32)}
        embedding = make_embedding(pooled, params, normalize=self._parsed.normalize)
        if self._parsed.as_json:
            return {"text_output": as_strings([json.dumps(embedding.tolist())])}
        return {"embedding": embedding}

"""Turns a client's tensors into a checked request; errors name the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from paged_backend.grammar.client import GrammarChecker
from paged_backend.parsers.formats import ResponseFormat
from paged_backend.parsers.reading_time import ReadingTime
from paged_backend.parsers.response import ResponseReader
from paged_backend.serving import fields
from paged_backend.serving.contract import Array
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.preparation import check_may_wait, may_have_name
from paged_backend.serving.requests.prompts import UTF8_BYTES, PromptReader
from paged_backend.serving.requests.tasks import (
    CANCEL,
    CHARGED,
    EMBED,
    GENERATE,
    INSPECT,
    SCORE,
    CancelTask,
    EmbedTask,
    GenerateTask,
    InspectTask,
    ScoreTask,
    Task,
    TaskReader,
    TokenizerTask,
)
from paged_backend.serving.requests.tool_use import PARSED, ToolUse
from paged_backend.text.bad_words import resolve_bad_words
from paged_backend.text.detokenizer import text_of_prompt
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.contract import INPUTS
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.options.responses import ResponseOptions
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.request import Request, RequestLimits, RequestOptions
from paged_backend.values.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from paged_backend.values.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams
from paged_backend.values.validation import coerce, shorten

CALL_ID = "call_id"
RESERVED_PREFIX = "triton_"  # parameters of Triton's own, not of the request

_CALL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MAX_CALL_ID_JSON = 6 * 64 + 2  # characters, each of which may be written as six
# Names of the prompt in other APIs.
_PROMPT_ELSEWHERE = ("prompt", "inputs")
_RETURN = "return_"
_RETURN_FLAGS = [spec.name for spec in INPUTS if spec.name.startswith(_RETURN)]
LOGITS = ("context_logits", "generation_logits")  # outputs that are sampling parameters, too
# Part of vllm_backend's contract, so clients may send them.
_NOT_SUPPORTED = {
    "image": "cannot be used: the model takes no images",
    "text_pair": "can only be used with task: score",
}


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The options for the responses of a request."""

    stream: bool
    echo: bool  # the prompt's text goes before the answer's
    wanted: frozenset[str]  # X for each `return_X` that is set
    pass_through: Array | None = None  # to be given back as it is


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """Everything that one request asks for."""

    request: Request
    options: AnswerOptions
    prompt_text: str  # empty unless it is echoed
    is_text: bool = False  # the prompt was not given as token ids
    timeout_s: float | None = None  # from arrival to the last token
    kept_special_ids: frozenset[int] = frozenset()  # special tokens that the text keeps
    # Makes a reader for each completion, with the time of all; None if the answer is text only.
    new_reader: Callable[[ReadingTime], ResponseReader] | None = None


class RequestParser:
    """Checks requests against one loaded model.

    Args:
        tokenizer: tokenizer of the model.
        limits: limits of requests.
        grammars: translates constraints; without it they are only checked.
        tool_use: reads tools; without it they are refused.
        defaults: parameters of requests that leave them out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        grammars: GrammarChecker | None = None,
        tool_use: ToolUse | None = None,
        defaults: SamplingDefaults = NO_DEFAULTS,
    ) -> None:
        self._defaults = defaults
        self._grammars = grammars
        self._tool_use = tool_use or ToolUse(
            ResponseFormat(), tokenizer, ResponseOptions(), limits.max_json_depth
        )
        self._tokenizer = tokenizer
        self.limits = limits
        self.prompts = PromptReader(tokenizer, limits)
        self._tasks = TaskReader(tokenizer, limits, self.prompts, self._tool_use, defaults)

    def read(self, tensors: Tensors, parameters_json: str) -> Task:
        """Return what a request asks for; this does not tokenize, so it is quick.

        Args:
            tensors: the request's input tensors.
            parameters_json: the request's parameters, a JSON object or empty.

        Raises:
            InvalidRequest: the task is not known, a field is too long, or ``call_id`` is wrong.
        """
        name = self._tasks.name(tensors)
        self._check_lengths(tensors, parameters_json)
        if name == CANCEL:
            return CancelTask(self._call_id_to_cancel(tensors, parameters_json))
        if name == INSPECT:
            return InspectTask()
        if name == EMBED:
            return EmbedTask(self.call_id(tensors, parameters_json))
        if name == SCORE:
            return ScoreTask(self.call_id(tensors, parameters_json))
        if name == GENERATE:
            return GenerateTask(self.call_id(tensors, parameters_json))
        return TokenizerTask(name, is_charged=name in CHARGED)

    def answer_task(self, task: TokenizerTask, tensors: Tensors) -> dict[str, Array]:
        """Return the answer to a task that needs the tokenizer only.

        Raises:
            InvalidRequest: the prompt cannot be used.
        """
        return self._tasks.answer(task, tensors)

    def tenant_of_task(self, parameters_json: str) -> str:
        """Return the tenant of a request that needs the tokenizer only.

        Raises:
            InvalidRequest: the parameters cannot be read, or the tenant is invalid.
        """
        values = self._json_object("parameters", parameters_json or "{}")
        return RequestOptions.take_from({"tenant": values.get("tenant", "")}).tenant

    def parse(
        self,
        request_id: str,
        tensors: Tensors,
        parameters_json: str,
        admit: Callable[[str], None] = lambda tenant: None,
    ) -> ParsedRequest:
        """Check one request.

        Args:
            request_id: the id by which the engine will know it.
            tensors: the request's input tensors.
            parameters_json: the request's parameters, a JSON object or empty.
            admit: called with the tenant before the prompt is tokenized; it may raise.

        Raises:
            InvalidRequest: naming the field and the allowed range.
        """
        self.limits.check_generates()
        for name, problem in _NOT_SUPPORTED.items():
            if name in tensors:
                raise InvalidRequest(name, problem)
        options = answer_options(tensors)
        if options.pass_through is not None:
            self.check_pass_through(options.pass_through, stream=options.stream)
        values = self.sampling_values(tensors, parameters_json)
        own = RequestOptions.take_from(values)
        admit(own.tenant)
        params = resolve_bad_words(self._tokenizer, self._sampling_params(values))
        if not options.wanted.isdisjoint(LOGITS):
            params = replace(
                params,
                return_context_logits="context_logits" in options.wanted,
                return_generation_logits="generation_logits" in options.wanted,
            )
        tools = self._tool_use.read(tensors)
        if "messages" in tensors:
            check_may_wait()
        prompt = self.prompts.read(tensors, tools.definitions)
        self.limits.check(prompt.token_ids, params)
        self.limits.check_total_logprobs(len(prompt.token_ids), params)
        prompt_text = ""
        if options.echo:
            prompt_text = prompt.text or text_of_prompt(
                self._tokenizer, prompt.token_ids, skip_special_tokens=params.skip_special_tokens
            )
        is_parsed = not options.wanted.isdisjoint(PARSED)
        constraint = self._tool_use.constraint(
            params, tools, prompt, own.thinking_token_budget, is_parsed=is_parsed
        )
        grammar = self._grammar(params, constraint, own)
        if grammar:  # the constraint has become the grammar
            params = replace(params, structured_outputs=None)
        request = Request(
            request_id,
            prompt.token_ids,
            params,
            own.cache_salt,
            own.priority,
            own.tenant,
            grammar,
            call_id=self.call_id(tensors, parameters_json) or "",
        )
        parsed = ParsedRequest(
            request, options, prompt_text, prompt.text is not None, own.timeout_s
        )
        if not is_parsed or self._tool_use.is_plain:
            return parsed
        return replace(
            parsed,
            kept_special_ids=self._tool_use.kept_special_ids,
            new_reader=partial(self._tool_use.reader, tools, prompt),
        )

    def _sampling_params(self, given: Mapping[str, Any]) -> SamplingParams:
        """Return the parameters of a request, with the model's defaults for those left out.

        Raises:
            InvalidRequest: naming the field and the allowed range.
        """
        largest = self.limits.max_output_tokens
        values = self._defaults.completed(given, largest)
        values.setdefault("max_tokens", min(DEFAULT_MAX_TOKENS, largest))
        return self._defaults.limited(self.limits.bounded(SamplingParams.from_mapping(values)))

    def _grammar(
        self, params: SamplingParams, constraint: OutputConstraint | None, own: RequestOptions
    ) -> str:
        """Return the grammar of a request's constraint; empty without one.

        Raises:
            InvalidRequest: the constraint cannot be enforced, or ``min_tokens`` contradicts it.
            RequestRefused: it cannot be checked at present.
            MustWait: this thread must not wait for it to be checked.
        """
        if constraint is None or self._grammars is None:
            return ""
        if params.min_tokens > 0:
            raise InvalidRequest("min_tokens", "must be 0: tools decide where the answer may end")
        check_may_wait()
        return self._grammars.grammar(constraint, tenant=own.tenant, salt=own.cache_salt)

    def sampling_values(self, tensors: Tensors, parameters_json: str) -> dict[str, Any]:
        """Return the sampling parameters of a request by name.

        They are read from the tensor ``sampling_parameters``, or from the request's parameters if
        there is no such tensor. The tensors ``stop``, ``bad_words``, ``stop_token_ids`` and
        ``allowed_token_ids`` take precedence. Strings become numbers and booleans where necessary;
        the values are not checked.

        Raises:
            InvalidRequest: they cannot be read.
        """
        if "sampling_parameters" in tensors:
            name = "sampling_parameters"
            values = self._json_object(name, fields.string(name, tensors[name]))
        else:
            values = self._json_object("parameters", parameters_json or "{}")
            values = {
                name: value
                for name, value in values.items()
                if name != CALL_ID and not name.startswith(RESERVED_PREFIX)
            }
        if (
            values.pop("lora_name", None) is not None
        ):  # vllm_backend's wording, which its clients compare
            raise InvalidRequest.verbatim("lora_name", "LoRA feature is not enabled.")
        for name in _PROMPT_ELSEWHERE:
            if name in values:
                raise InvalidRequest(name, "is not known; the prompt's name here is text_input")
        for name in ("stop", "bad_words"):
            if name in tensors:
                values[name] = fields.strings(name, tensors[name])
        for name in ("stop_token_ids", "allowed_token_ids"):
            if name in tensors:
                values[name] = fields.elements(name, tensors[name])
        return coerce(SamplingParams, values)

    def check_pass_through(self, tensor: Array, *, stream: bool) -> None:
        """Check the length of ``pass_through``, which is returned with each response.

        A request that does not stream has one response, so its limit is higher: ``pass_through``
        may hold the text of a prompt.

        Raises:
            InvalidRequest: it is too long.
        """
        length = len(fields.single("pass_through", tensor))
        limit, reason = self.limits.max_pass_through_length, "max_pass_through_length"
        if not stream:
            limit, reason = max(limit, self.prompts.max_json_length), "with stream: false"
        if length > limit:
            raise InvalidRequest(
                "pass_through", f"has {length} bytes, more than {limit} ({reason})"
            )

    def call_id(self, tensors: Tensors, parameters_json: str) -> str | None:
        """Return the name that the client gave to the request, by which it can be canceled.

        The name is a tensor or a parameter. Ensembles pass parameters on, and tensors only where
        they declare them.

        Raises:
            InvalidRequest: the name is invalid, or the tensor and the parameter differ.
        """
        names: list[Any] = []
        if CALL_ID in tensors:
            names.append(fields.string(CALL_ID, tensors[CALL_ID]))
        if may_have_name(parameters_json, CALL_ID):
            self._check_json_length("parameters", len(parameters_json))
            names += _call_ids(parameters_json)
        if not names:
            return None
        for name in names:
            if not isinstance(name, str) or not _CALL_ID.fullmatch(name):
                problem = "must have 1 to 64 letters, digits, '_' and '-', got "
                raise InvalidRequest(CALL_ID, problem + shorten(name))
        if len(set(names)) > 1:
            raise InvalidRequest(CALL_ID, "must be the same as a tensor and as a parameter")
        return str(names[0])

    def _call_id_to_cancel(self, tensors: Tensors, parameters_json: str) -> str:
        """Return the name of the requests that a cancellation should end.

        Raises:
            InvalidRequest: it is missing or invalid.
        """
        call_id = self.call_id(tensors, parameters_json)
        if call_id is None:
            raise InvalidRequest(CALL_ID, "is missing; it names the request to cancel")
        return call_id

    def _check_lengths(self, tensors: Tensors, parameters_json: str) -> None:
        """Refuse a request with a field that is too long, without reading the field.

        Raises:
            InvalidRequest: naming the field.
        """
        self.prompts.check_lengths(tensors)
        name = "sampling_parameters"
        if name in tensors:
            self._check_json_length(name, len(fields.single(name, tensors[name])) // UTF8_BYTES)
        self._check_json_length("parameters", len(parameters_json))

    def _check_json_length(self, name: str, length: int) -> None:
        if length > self.limits.max_json_length:
            raise InvalidRequest(
                name, f"has over {self.limits.max_json_length} characters (max_json_length)"
            )

    def _json_object(self, name: str, source: str) -> dict[str, Any]:
        self._check_json_length(name, len(source))
        return fields.json_object(name, source, self.limits.max_json_depth)


class _Parameters(msgspec.Struct):
    """The one parameter that is read before the others, which are skipped."""

    call_id: msgspec.Raw = msgspec.Raw()


_PARAMETERS = msgspec.json.Decoder(_Parameters)


def _call_ids(parameters_json: str) -> list[object]:
    """Return the name in a request's parameters, unchecked, if there is one.

    Raises:
        InvalidRequest: the parameters cannot be read.
    """
    try:
        raw = bytes(_PARAMETERS.decode(parameters_json).call_id)
        if len(raw) > _MAX_CALL_ID_JSON:  # too long for any valid name
            return [raw.decode()]
        return [msgspec.json.decode(raw)] if raw else []
    except msgspec.ValidationError as error:
        raise InvalidRequest("parameters", "must be a JSON object") from error
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise InvalidRequest("parameters", f"is not valid JSON: {shorten(str(error))}") from error


def answer_options(tensors: Tensors) -> AnswerOptions:
    """Read the options for the responses of a request.

    Raises:
        InvalidRequest: two options exclude each other.
    """
    stream = fields.flag(tensors, "stream")
    if stream and not fields.flag(tensors, "exclude_input_in_output", default=True):
        # vllm_backend's wording, which its clients compare.
        raise InvalidRequest.verbatim(
            "exclude_input_in_output",
            "Error generating stream: When streaming, `exclude_input_in_output` = False is not "
            "allowed.",
        )
    return AnswerOptions(
        stream=stream,
        # A chat's prompt is the text of a template, which its client has not written.
        echo=not fields.flag(
            tensors, "exclude_input_in_output", default=stream or "messages" in tensors
        ),
        wanted=frozenset(
            name.removeprefix(_RETURN) for name in _RETURN_FLAGS if fields.flag(tensors, name)
        ),
        pass_through=tensors.get("pass_through"),
    )

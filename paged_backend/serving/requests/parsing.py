"""Turns a client's tensors into a checked request; errors name the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from paged_backend.grammar.client import GrammarChecker
from paged_backend.parsers.formats import ResponseFormat
from paged_backend.parsers.reading_time import ReadingTime
from paged_backend.parsers.response import ResponseReader
from paged_backend.process.adapter_names import AdapterNames
from paged_backend.serving import fields
from paged_backend.serving.contract import Array
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.parameters import (
    CALL_ID,
    OWN,
    SAMPLING,
    RequestParameters,
    call_id_of,
    check_json_length,
    take_lora_name,
)
from paged_backend.serving.requests.preparation import check_may_wait
from paged_backend.serving.requests.prompts import UTF8_BYTES, PromptReader
from paged_backend.serving.requests.tasks import Task, TaskKind, read_kind
from paged_backend.serving.requests.tokenizer_tasks import TokenizerTasks
from paged_backend.serving.requests.tool_use import PARSED, ToolUse
from paged_backend.text.bad_words import resolve_bad_words
from paged_backend.text.detokenizer import text_of_prompt
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.contract import INPUTS
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import LoRARequest
from paged_backend.values.options.responses import ResponseOptions
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.request import Request, RequestLimits, RequestOptions
from paged_backend.values.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from paged_backend.values.sampling_params import DEFAULT_MAX_TOKENS, SamplingParams

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
        names: knows the LoRA adapters; without it their names are not looked up.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: RequestLimits,
        grammars: GrammarChecker | None = None,
        tool_use: ToolUse | None = None,
        defaults: SamplingDefaults = NO_DEFAULTS,
        names: AdapterNames | None = None,
    ) -> None:
        self._defaults = defaults
        self._names = names
        self._grammars = grammars
        self._tool_use = tool_use or ToolUse(
            ResponseFormat(), tokenizer, ResponseOptions(), limits.max_json_depth
        )
        self._tokenizer = tokenizer
        self.limits = limits
        self.prompts = PromptReader(tokenizer, limits)
        self.tokenizer_tasks = TokenizerTasks(
            tokenizer, limits, self.prompts, self._tool_use, defaults, names
        )

    def read(self, tensors: Tensors, parameters_json: str) -> Task:
        """Return what a request asks for; this does not tokenize or decode, so it is quick.

        Args:
            tensors: the request's input tensors.
            parameters_json: the request's parameters, a JSON object or empty.

        Raises:
            InvalidRequest: the task is not known, a field is too long, or ``call_id`` is wrong.
        """
        kind = read_kind(tensors)
        self._check_lengths(tensors, parameters_json)
        call_id = ""
        if kind.is_computed or kind is TaskKind.CANCEL:
            call_id = call_id_of(tensors, parameters_json)
        if kind is TaskKind.CANCEL and not call_id:
            raise InvalidRequest(CALL_ID, "is missing; it names the request to cancel")
        return Task(
            kind, tensors, RequestParameters(tensors, parameters_json, self.limits), call_id
        )

    def parse(
        self, request_id: str, task: Task, admit: Callable[[str], None] = lambda tenant: None
    ) -> ParsedRequest:
        """Check one request for tokens.

        Args:
            request_id: the id by which the engine will know it.
            task: what it asks for.
            admit: called with the tenant before the prompt is tokenized; it may raise.

        Raises:
            InvalidRequest: naming the field and the allowed range.
        """
        tensors = task.tensors
        self.limits.check_generates()
        for name, problem in _NOT_SUPPORTED.items():
            if name in tensors:
                raise InvalidRequest(name, problem)
        options = answer_options(tensors)
        if options.pass_through is not None:
            self.check_pass_through(options.pass_through, stream=options.stream)
        values = dict(task.parameters.sampling)
        own = RequestOptions.take_from(values)
        lora = self._adapter(take_lora_name(values), values.pop("lora_path", None))
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
            call_id=task.call_id,
            cache_hit_threshold=own.cache_hit_threshold,
            speculate=own.speculate,
            predicted_token_ids=self._predicted(own, params),
            lora=lora,
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

    def _adapter(self, name: str, path: object) -> LoRARequest | None:
        """Return the adapter of a name; None for an empty one.

        Args:
            name: the name, or empty.
            path: the folder that the adapter must have; None for any.

        Raises:
            InvalidRequest: there is no such adapter.
        """
        if path is not None and not name:
            raise InvalidRequest("lora_path", "must come with lora_name")
        if not name or self._names is None:
            return None
        lora = self._names.find(name)
        if path is not None and path != lora.lora_path:
            raise InvalidRequest("lora_path", f"is not the folder of the loaded adapter {name}")
        return lora

    def _predicted(self, own: RequestOptions, params: SamplingParams) -> list[int]:
        """Return the tokens of a prediction, as many as an answer may have."""
        if not own.prediction:
            return []
        if not own.speculate:
            raise InvalidRequest("prediction", "cannot be used with speculate: false")
        if params.beam_width > 1:
            raise InvalidRequest("prediction", "cannot be used with beam search")
        if not self.limits.speculates:
            problem = "cannot be used: the engine does not speculate (speculative_config)"
            raise InvalidRequest("prediction", problem)
        predicted = self.prompts.encode("prediction", own.prediction, add_special_tokens=False)
        token_ids = predicted.token_ids[: self.limits.max_model_len]
        self.limits.check_token_ids("prediction", token_ids)
        return token_ids

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
        if params.beam_width > 1:
            raise InvalidRequest("beam_width", "must be 1 with tools or a limit of reasoning")
        if params.min_tokens > 0:
            raise InvalidRequest("min_tokens", "must be 0: tools decide where the answer may end")
        check_may_wait()
        return self._grammars.grammar(constraint, tenant=own.tenant, salt=own.cache_salt)

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

    def _check_lengths(self, tensors: Tensors, parameters_json: str) -> None:
        """Refuse a request with a field that is too long, without reading the field.

        Raises:
            InvalidRequest: naming the field.
        """
        self.prompts.check_lengths(tensors)
        if SAMPLING in tensors:
            length = len(fields.single(SAMPLING, tensors[SAMPLING])) // UTF8_BYTES
            check_json_length(SAMPLING, length, self.limits)
        check_json_length(OWN, len(parameters_json), self.limits)


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

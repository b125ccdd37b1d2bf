"""The offline API: an engine in this process."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple, TypeAlias, TypeVar

from tqdm import tqdm

from paged_backend.checkpoint.hub import resolve_checkpoint
from paged_backend.embeddings.vectors import cosine_similarity, make_embedding, read_score
from paged_backend.engine.engine import Engine
from paged_backend.engine.executors import open_executor
from paged_backend.grammar.client import GrammarChecker
from paged_backend.grammar.compiler import LlguidanceCompiler
from paged_backend.text.bad_words import resolve_bad_words
from paged_backend.text.chat import Chat
from paged_backend.text.text_stream import TextStream
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.values.beams import BeamSearchParams
from paged_backend.values.engine_args import from_mapping
from paged_backend.values.errors import InvalidRequest, option_error
from paged_backend.values.log import LOG
from paged_backend.values.lora import LoRARequest
from paged_backend.values.options.kv_events import OPTION as KV_EVENTS
from paged_backend.values.output_constraint import OutputConstraint
from paged_backend.values.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    FinishReason,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    SequenceOutput,
    TokenLogprobs,
)
from paged_backend.values.pooling_params import PoolingParams
from paged_backend.values.request import Request
from paged_backend.values.sampling_params import SamplingParams
from paged_backend.values.tool_choice import read_tools
from paged_backend.values.validation import shorten

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, or vLLM's objects of them: ``{"prompt": ...}``, ``{"prompt_token_ids": ...}``.

Token ids may also be an array of numpy or torch, and several prompts one with two dimensions.
"""
Conversation: TypeAlias = Sequence[Mapping[str, Any]]
"""The messages of a chat, as OpenAI's."""
P = TypeVar("P", SamplingParams, PoolingParams)

PROGRESS_AFTER_S = 1.0  # no progress bar for shorter work
_PROMPTS = (
    "must be a string, token ids, an object with prompt or prompt_token_ids, or a list of these"
)


class _Prompt(NamedTuple):
    """A prompt as it was read: its text, its token ids, or both, of which the ids count."""

    text: str | None = None
    token_ids: list[int] | None = None


class LLM:
    """A model that answers batches of prompts.

    Args:
        model: folder, GGUF file or Hugging Face id of the checkpoint, or ``demo`` or
            ``demo-tools`` for a bundled one.
        engine_args: options of :class:`paged_backend.values.config.EngineConfig`, or other engine
            arguments of vLLM, unless their value asks for something that this engine lacks.

    Raises:
        ConfigError: an option or the checkpoint cannot be used.
    """

    def __init__(self, model: str = "demo", **engine_args: Any) -> None:
        args = from_mapping({"model": model, **engine_args})
        if args.without_effect:
            LOG.info("options without effect here: %s", ", ".join(args.without_effect))
        self.config = args.config
        if self.config.kv_events().is_on:
            raise option_error(KV_EVENTS, "is for servers: nothing publishes events here")
        checkpoint = resolve_checkpoint(self.config)
        self.tokenizer = load_tokenizer(checkpoint.tokenizer, self.config)
        executor = open_executor(self.config, checkpoint.model, checkpoint.tokenizer)
        info = executor.info
        grammars = LlguidanceCompiler(checkpoint.tokenizer, info.vocab_size, info.eos_token_ids)
        self.engine = Engine(self.config, executor, grammars=grammars)
        self._checker = GrammarChecker(checkpoint.tokenizer, info.vocab_size)
        self._num_requests = 0

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters of `generate` without any, as the checkpoint recommends them.

        The options ``generation_config`` and ``override_generation_config`` can change them.
        ``SamplingParams`` that are given have their own defaults for what they leave out.
        """
        defaults = self.engine.executor.info.sampling_defaults
        return SamplingParams(**defaults.values(self.engine.limits.max_output_tokens))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions of prompts, in their order.

        Args:
            prompts: one prompt or several.
            sampling_params: one object for all prompts, or one for each; default: the model's, see
                `get_default_sampling_params`.
            lora_request: the LoRA adapter of all prompts, or one or none for each.

        Raises:
            ConfigError: an adapter cannot be used; nothing was computed.
            InvalidRequest: a prompt or its parameters cannot be used; nothing was computed.
        """
        several = _several(prompts)
        default = self.get_default_sampling_params()
        each = _each("sampling_params", sampling_params, default, len(several))
        adapters = self._adapters(lora_request, len(several))
        answers = [
            self._answer(prompt.text, ids, params, adapter)
            for prompt, ids, params, adapter in zip(
                several, self._encode(several), each, adapters, strict=True
            )
        ]
        for answer in answers:
            self.engine.limits.check(answer.request.prompt_token_ids, answer.request.params)
        by_id = {answer.request.request_id: answer for answer in answers}

        def take(output: SequenceOutput) -> bool:
            answer = by_id[output.request_id]
            if answer.append(output):
                self.engine.scheduler.stop_completion(output.request_id, output.index)
            return answer.reasons[output.index] is not None

        self._run([answer.request for answer in answers], take)
        return [answer.output() for answer in answers]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams | Sequence[BeamSearchParams],
    ) -> list[BeamSearchOutput]:
        """Find the likeliest answers to prompts, in the order of the prompts.

        Args:
            prompts: one prompt or several.
            params: one object for all prompts, or one for each.

        Raises:
            InvalidRequest: a prompt or its parameters cannot be used.
        """
        several = params if isinstance(params, Sequence) else [params]
        each = [_sampling_params_of(item) for item in several]
        outputs = self.generate(prompts, each if isinstance(params, Sequence) else each[0])
        return [_beam_search_output(output) for output in outputs]

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Generate answers to conversations, in their order, with the model's chat template.

        Args:
            messages: one conversation, a list of OpenAI's messages, or several.
            sampling_params: as of `generate`.
            tools: OpenAI's tools, for the template. Calls are text of the answer.
            lora_request: as of `generate`.
            options: fields of :class:`paged_backend.text.chat.Chat`: ``chat_template_kwargs``,
                ``add_generation_prompt``, ``continue_final_message``, ``reasoning_effort`` and
                ``documents``.

        Raises:
            InvalidRequest: the model has no chat template, or a message, an option or the
                parameters cannot be used; nothing was computed.
        """
        if tools is not None:
            read_tools(tools)
        chats = [
            Chat.from_json({**options, "messages": conversation})
            for conversation in _conversations(messages)
        ]
        template = self.tokenizer.chat_template
        if template is None:
            raise InvalidRequest("messages", "cannot be used: the model has no chat template")
        texts = [template.render(chat, tools or ()) for chat in chats]
        encoded = self.tokenizer.encode_prompts(texts, add_special_tokens=False)
        prompts: list[Prompt] = [
            {"prompt": text, "prompt_token_ids": ids}
            for text, ids in zip(texts, encoded, strict=True)
        ]
        return self.generate(prompts, sampling_params, lora_request)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Make embeddings of prompts, in their order.

        Args:
            prompts: one prompt or several.
            pooling_params: one object for all prompts, or one for each.

        Raises:
            InvalidRequest: the model generates, or a prompt or its parameters cannot be used;
                nothing was computed.
        """
        several = _several(prompts)
        each = _each("pooling_params", pooling_params, PoolingParams(), len(several))
        return self._embed(several, each)

    def _embed(
        self, prompts: Sequence[_Prompt], each: Sequence[PoolingParams]
    ) -> list[EmbeddingRequestOutput]:
        requests = [
            self._embedding_request(ids, params)
            for ids, params in zip(self._encode(prompts), each, strict=True)
        ]
        ends = self._pool(requests)
        return [
            self._embedding_output(request, end)
            for request, end in zip(requests, ends, strict=True)
        ]

    def score(
        self, data_1: Prompt | Sequence[Prompt], data_2: Prompt | Sequence[Prompt]
    ) -> list[ScoringRequestOutput]:
        """Score pairs of texts: by the reranker, or by the cosine similarity of their embeddings.

        Args:
            data_1: one text, which is compared with each of the others, or one for each of them.
            data_2: one text or several. A reranker takes no token ids.

        Raises:
            InvalidRequest: the model generates, the numbers of texts differ, or a text cannot be
                used; nothing was computed.
        """
        first, second = _several(data_1), _several(data_2)
        if len(first) not in (1, len(second)):
            raise InvalidRequest("data_1", f"has {len(first)} entries for {len(second)} in data_2")
        if self.engine.limits.scores_pairs:
            queries = [*first] * (len(second) if len(first) == 1 else 1)
            return self._score_pairs(list(zip(queries, second, strict=True)))
        several = [*first, *second]
        outputs = self._embed(several, [PoolingParams()] * len(several))
        documents = outputs[len(first) :]
        ours = outputs[: len(first)] * (len(documents) if len(first) == 1 else 1)
        return [_score(query, document) for query, document in zip(ours, documents, strict=True)]

    def _score_pairs(self, pairs: Sequence[tuple[_Prompt, _Prompt]]) -> list[ScoringRequestOutput]:
        texts = [(_text("data_1", query), _text("data_2", document)) for query, document in pairs]
        requests = [self._pair_request(ids) for ids in self.tokenizer.encode_batch(texts)]
        return [
            ScoringRequestOutput(
                request.request_id,
                ScoringOutput(read_score(end.pooled or b"")),
                request.prompt_token_ids,
                end.num_cached_tokens,
            )
            for request, end in zip(requests, self._pool(requests), strict=True)
        ]

    def _pair_request(self, ids: list[int]) -> Request:
        self.engine.limits.check_pair(ids)
        self._num_requests += 1
        return Request(str(self._num_requests), ids, pooling=PoolingParams())

    def _pool(self, requests: list[Request]) -> list[SequenceOutput]:
        """Run requests that generate nothing; returns their only outputs."""
        ends: dict[str, SequenceOutput] = {}

        def take(output: SequenceOutput) -> bool:
            ends[output.request_id] = output
            return True

        self._run(requests, take)
        return [ends[request.request_id] for request in requests]

    def _encode(self, prompts: Sequence[_Prompt]) -> list[list[int]]:
        """Return the token ids of prompts; all texts are encoded at once, on several cores."""
        texts = [prompt.text or "" for prompt in prompts if prompt.token_ids is None]
        encoded = iter(self.tokenizer.encode_prompts(texts))
        return [
            next(encoded) if prompt.token_ids is None else prompt.token_ids for prompt in prompts
        ]

    def _embedding_request(self, ids: list[int], params: PoolingParams) -> Request:
        self.engine.limits.check_embedding(ids, params)
        self._num_requests += 1
        return Request(str(self._num_requests), ids, pooling=params)

    def _embedding_output(self, request: Request, output: SequenceOutput) -> EmbeddingRequestOutput:
        assert output.pooled is not None
        assert request.pooling is not None
        normalize = self.engine.limits.normalize
        embedding = make_embedding(output.pooled, request.pooling, normalize=normalize)
        return EmbeddingRequestOutput(
            request.request_id,
            EmbeddingOutput(embedding.tolist()),
            request.prompt_token_ids,
            output.num_cached_tokens,
        )

    def _adapters(
        self, given: LoRARequest | Sequence[LoRARequest | None] | None, number: int
    ) -> list[LoRARequest | None]:
        """Load the adapters that are new, and return the adapter of each prompt."""
        each = [given] * number if given is None or isinstance(given, LoRARequest) else list(given)
        if len(each) != number:
            raise InvalidRequest("lora_request", f"has {len(each)} entries for {number} prompts")
        for adapter in each:
            if adapter is not None:
                self.engine.adapters.load(adapter)
        return each

    def _answer(
        self, text: str | None, ids: list[int], params: SamplingParams, lora: LoRARequest | None
    ) -> OfflineAnswer:
        params = resolve_bad_words(self.tokenizer, self.engine.limits.bounded(params))
        self._num_requests += 1
        grammar = ""
        if params.structured_outputs is not None:
            grammar = self._checker.grammar(OutputConstraint(params.structured_outputs))
            params = replace(params, structured_outputs=None)  # it has become the grammar
        request = Request(str(self._num_requests), ids, params, grammar=grammar, lora=lora)
        streams = [TextStream(self.tokenizer, params, prompt=ids) for _ in range(params.n)]
        return OfflineAnswer(request, text, streams)

    def _run(self, requests: list[Request], take: Callable[[SequenceOutput], bool]) -> None:
        """Run requests to their end; ``take`` returns whether an output ends an answer."""
        total = sum(request.params.n for request in requests)
        try:
            for request in requests:
                self.engine.add_request(request)
            with tqdm(  # only on a terminal (disable=None)
                total=total, unit="answer", delay=PROGRESS_AFTER_S, leave=False, disable=None
            ) as bar:
                while self.engine.has_unfinished:
                    for output in self.engine.step():
                        bar.update(take(output))
        finally:  # after Ctrl-C too, the engine is left empty
            for request in requests:
                self.engine.abort_request(request.request_id)


class OfflineAnswer:
    """Collects the completions of one prompt."""

    def __init__(self, request: Request, prompt: str | None, streams: list[TextStream]) -> None:
        self.request = request
        self.reasons: list[FinishReason | None] = [None for _ in streams]
        self._prompt = prompt
        self._streams = streams
        self._texts = ["" for _ in streams]
        self._token_ids: list[list[int]] = [[] for _ in streams]
        asked = request.params.logprobs is not None
        self._logprobs: list[list[TokenLogprobs] | None] = [[] if asked else None for _ in streams]
        self._prompt_logprobs: list[TokenLogprobs] | None = None
        self._num_cached_tokens = 0
        self._problem = ""  # reason why the request failed, if it did

    def append(self, output: SequenceOutput) -> bool:
        """Add new tokens; returns whether a stop string ended a completion before the engine."""
        delta = self._streams[output.index].append(output.new_token_ids, output.finish_reason)
        self._texts[output.index] += delta.text
        self._token_ids[output.index] += delta.token_ids
        self.reasons[output.index] = delta.finish_reason
        logprobs = self._logprobs[output.index]
        if logprobs is not None and output.logprobs is not None:
            logprobs += output.logprobs[: len(delta.token_ids)]
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
        self._num_cached_tokens = output.num_cached_tokens
        self._problem = self._problem or output.problem
        return delta.finish_reason is not None and output.finish_reason is None

    def output(self) -> RequestOutput:
        """Return the finished completions."""
        parts = zip(self._texts, self._token_ids, self.reasons, self._logprobs, strict=True)
        return RequestOutput(
            self.request.request_id,
            self._prompt,
            self.request.prompt_token_ids,
            [
                CompletionOutput(
                    index,
                    *part,
                    problem=self._problem_after(part[2]),
                    stop_reason=self._stop_reason(index),
                )
                for index, part in enumerate(parts)
            ],
            self._num_cached_tokens,
            self._prompt_logprobs,
        )

    def _stop_reason(self, index: int) -> str | int | None:
        """Return the stop string or the stop token that ended a completion, if one did."""
        if self.reasons[index] is not FinishReason.STOP:
            return None
        if self._streams[index].stopped:
            return self._streams[index].stop_string
        last = self._token_ids[index][-1:]
        return next((token for token in last if token in self.request.params.stop_token_ids), None)

    def _problem_after(self, reason: FinishReason | None) -> str:
        return self._problem if reason is FinishReason.ERROR else ""


def _several(prompts: Prompt | Sequence[Prompt]) -> list[_Prompt]:
    """Read prompts; a single one becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [_read_prompt(prompts)]
    items = _items(prompts)
    if items and _as_id(items[0]) is not None:
        return [_read_prompt(items)]
    return [_read_prompt(item) for item in items]


def _conversations(
    messages: Conversation | Sequence[Conversation],
) -> list[Any]:
    """Return conversations; a single one becomes a list of one. Their messages are not checked."""
    if not isinstance(messages, list | tuple) or not messages or isinstance(messages[0], Mapping):
        return [messages]
    return [list(item) if isinstance(item, tuple) else item for item in messages]


def _read_prompt(value: object) -> _Prompt:
    if isinstance(value, str):
        return _Prompt(text=value)
    if not isinstance(value, Mapping):
        return _Prompt(token_ids=_token_ids(value))
    given = {name: field for name, field in value.items() if field is not None}
    text, ids = given.pop("prompt", None), given.pop("prompt_token_ids", None)
    for name in given:
        raise InvalidRequest(str(name), "of a prompt is not supported")
    if not isinstance(text, str) and (ids is None or text is not None):
        raise InvalidRequest("prompt", _problem(value))
    return _Prompt(text, None if ids is None else _token_ids(ids))


def _token_ids(value: object) -> list[int]:
    ids = [_as_id(item) for item in _items(value)]
    known = [token for token in ids if token is not None]
    if len(known) < len(ids):
        raise InvalidRequest("prompt", _problem(value))
    return known


def _items(value: object) -> list[Any]:
    """Return what a sequence or an array consists of."""
    items = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(items, list | tuple | range):
        return list(items)
    raise InvalidRequest("prompt", _problem(value))


def _as_id(value: object) -> int | None:
    """Return an integer of any library as Python's; None for other values."""
    try:
        return None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _problem(value: object) -> str:
    return f"{_PROMPTS}, got {shorten(value)}"


def _text(name: str, prompt: _Prompt) -> str:
    if prompt.text is None or prompt.token_ids is not None:
        raise InvalidRequest(name, f"must be texts for a reranker, got {shorten(prompt.token_ids)}")
    return prompt.text


def _each(name: str, params: P | Sequence[P] | None, default: P, num_prompts: int) -> Sequence[P]:
    """Return the parameters of each prompt."""
    if params is None:
        params = default
    each = params if isinstance(params, Sequence) else [params] * num_prompts
    for item in each:
        if not isinstance(item, type(default)):
            kind = type(default).__name__
            raise InvalidRequest(name, f"must be {kind}, or a list of them, got {shorten(item)}")
    if len(each) != num_prompts:
        raise InvalidRequest(name, f"has {len(each)} entries for {num_prompts} prompts")
    return each


def _sampling_params_of(params: BeamSearchParams) -> SamplingParams:
    values = asdict(params)
    if params.beam_width == 1:  # they do not change the only answer
        del values["length_penalty"], values["early_stopping"]
    beams = {"use_beam_search": True, "n": params.beam_width, "logprobs": 0}
    return SamplingParams.from_mapping(values | beams)


def _beam_search_output(output: RequestOutput) -> BeamSearchOutput:
    sequences = []
    for answer in output.outputs:
        logprobs = answer.logprobs or []
        total = sum(entry.logprob for entry in logprobs)
        tokens = output.prompt_token_ids + answer.token_ids
        sequences.append(
            BeamSearchSequence(tokens, total, answer.text, logprobs, answer.finish_reason)
        )
    return BeamSearchOutput(sequences)


def _score(query: EmbeddingRequestOutput, document: EmbeddingRequestOutput) -> ScoringRequestOutput:
    similarity = cosine_similarity(query.outputs.embedding, document.outputs.embedding)
    return ScoringRequestOutput(
        document.request_id,
        ScoringOutput(similarity),
        query.prompt_token_ids + document.prompt_token_ids,
        query.num_cached_tokens + document.num_cached_tokens,
    )

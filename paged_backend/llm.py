"""The offline API: an engine in this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from tqdm import tqdm

from paged_backend.checkpoint.hub import resolve_model
from paged_backend.engine import Engine
from paged_backend.engine_args import from_mapping
from paged_backend.errors import InvalidRequest
from paged_backend.grammar.client import GrammarChecker
from paged_backend.grammar.compiler import GrammarCompiler
from paged_backend.log import LOG
from paged_backend.output_constraint import OutputConstraint
from paged_backend.outputs import (
    CompletionOutput,
    FinishReason,
    RequestOutput,
    SequenceOutput,
    TokenLogprobs,
)
from paged_backend.request import Request
from paged_backend.sampling_params import SamplingParams
from paged_backend.text.bad_words import resolve_bad_words
from paged_backend.text.text_stream import TextStream
from paged_backend.text.tokenizer import load_tokenizer
from paged_backend.validation import shorten
from paged_backend.worker import Worker

Prompt: TypeAlias = str | Sequence[int]

PROGRESS_AFTER_S = 1.0  # no progress bar for shorter work


class LLM:
    """A model that answers batches of prompts.

    Args:
        model: folder, GGUF file or Hugging Face id of the checkpoint, or ``demo`` or
            ``demo-tools`` for a bundled one.
        engine_args: options of :class:`paged_backend.config.EngineConfig`, or other engine
            arguments of vLLM, unless their value asks for something that this engine lacks.

    Raises:
        ConfigError: an option or the checkpoint cannot be used.
    """

    def __init__(self, model: str = "demo", **engine_args: Any) -> None:
        args = from_mapping({"model": model, **engine_args})
        if args.without_effect:
            LOG.info("options without effect here: %s", ", ".join(args.without_effect))
        self.config = args.config
        folder = resolve_model(self.config.model)
        self.tokenizer = load_tokenizer(self.config.tokenizer or str(folder))
        worker = Worker(self.config, folder)
        tokenizer = self.config.tokenizer or str(folder)
        info = worker.info
        grammars = GrammarCompiler(tokenizer, info.vocab_size, info.eos_token_ids)
        self.engine = Engine(self.config, worker, grammars=grammars)
        self._checker = GrammarChecker(tokenizer, info.vocab_size)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate completions of prompts, each a string or a list of token ids, in their order.

        Args:
            prompts: one prompt or several.
            sampling_params: for all prompts, or one for each.

        Raises:
            InvalidRequest: a prompt or its parameters cannot be used; nothing was computed.
        """
        answers = [
            self._answer(prompt, params) for prompt, params in _pair(prompts, sampling_params)
        ]
        for answer in answers:
            self.engine.limits.check(answer.request.prompt_token_ids, answer.request.params)
        try:
            for answer in answers:
                self.engine.add_request(answer.request)
            self._run({answer.request.request_id: answer for answer in answers})
        finally:  # after Ctrl-C too, the engine is left empty
            for answer in answers:
                self.engine.abort_request(answer.request.request_id)
        return [answer.output() for answer in answers]

    def _answer(self, prompt: Prompt, params: SamplingParams) -> OfflineAnswer:
        text = prompt if isinstance(prompt, str) else None
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else _token_ids(prompt)
        params = resolve_bad_words(self.tokenizer, self.engine.limits.bounded(params))
        self._num_requests += 1
        grammar = ""
        if params.structured_outputs is not None:
            grammar = self._checker.grammar(OutputConstraint(params.structured_outputs))
            params = replace(params, structured_outputs=None)  # it has become the grammar
        request = Request(str(self._num_requests), ids, params, grammar=grammar)
        streams = [TextStream(self.tokenizer, params) for _ in range(params.n)]
        return OfflineAnswer(request, text, streams)

    def _run(self, answers: dict[str, OfflineAnswer]) -> None:
        total = sum(answer.request.params.n for answer in answers.values())
        with tqdm(  # only on a terminal (disable=None)
            total=total, unit="answer", delay=PROGRESS_AFTER_S, leave=False, disable=None
        ) as bar:
            while self.engine.has_unfinished:
                for output in self.engine.step():
                    answer = answers[output.request_id]
                    if answer.append(output):
                        self.engine.stop_completion(output.request_id, output.index)
                    bar.update(answer.reasons[output.index] is not None)


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
        return delta.finish_reason is not None and output.finish_reason is None

    def output(self) -> RequestOutput:
        """Return the finished completions."""
        parts = zip(self._texts, self._token_ids, self.reasons, self._logprobs, strict=True)
        return RequestOutput(
            self.request.request_id,
            self._prompt,
            self.request.prompt_token_ids,
            [CompletionOutput(index, *part) for index, part in enumerate(parts)],
            self._num_cached_tokens,
            self._prompt_logprobs,
        )


def _pair(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
) -> Iterable[tuple[Prompt, SamplingParams]]:
    several: Sequence[Any] = prompts
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int)):
        several = [prompts]
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        sampling_params = [sampling_params or SamplingParams()] * len(several)
    if len(sampling_params) != len(several):
        raise InvalidRequest(
            "sampling_params", f"has {len(sampling_params)} entries for {len(several)} prompts"
        )
    return zip(several, sampling_params, strict=True)


def _token_ids(prompt: Sequence[int]) -> list[int]:
    ids = list(prompt)
    if not all(type(token) is int for token in ids):
        raise InvalidRequest("prompt", f"must be a string or token ids, got {shorten(prompt)}")
    return ids

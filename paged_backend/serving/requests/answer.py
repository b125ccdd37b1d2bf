"""Turns the tokens of one request into responses that contain only what is new."""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from paged_backend.parsers.delta import ResponseDelta
from paged_backend.parsers.reading_time import ReadingTime
from paged_backend.parsers.response import ResponseReader
from paged_backend.serving.contract import Array, as_strings
from paged_backend.serving.requests.held_results import LOGPROB_BYTES
from paged_backend.serving.requests.large_responses import LARGE_BYTES
from paged_backend.serving.requests.logprobs import NOT_ASKED_FOR, logprobs_json
from paged_backend.serving.requests.parsing import ParsedRequest
from paged_backend.text.text_stream import Stops, StreamState, TextDelta, TextStream
from paged_backend.text.tokenizer import Tokenizer
from paged_backend.values.outputs import (
    DraftCounts,
    FinishReason,
    SequenceOutput,
    SequenceTimes,
    TokenLogprobs,
)

# The moments in the output ``metrics`` of a completion.
MOMENTS = (
    *("arrival_time_ns", "first_scheduled_time_ns"),
    *("first_token_time_ns", "last_token_time_ns"),
)
TOOL_CALLS = "tool_calls"  # the finish reason of an answer that calls tools
_TOKEN_BYTES = 8  # size of a token's text and id, as an estimate


@dataclass(slots=True)
class OpenCompletion:
    """One of the n completions of a request, and the part of it that was not sent yet."""

    stream: TextStream
    sent: StreamState  # state of the stream after what has been sent
    reader: ResponseReader | None = None  # None if the answer is text only
    text: list[str] = field(default_factory=list)
    parsed: list[ResponseDelta] = field(default_factory=list)  # in place of the text
    token_ids: list[int] = field(default_factory=list)
    first_of_text: int | None = None  # among these tokens
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0  # sum over all tokens, sent or not
    all_token_ids: list[int] = field(default_factory=list)  # sent or not
    times: SequenceTimes | None = None  # once there is a token
    last_token_s: float = 0.0  # when it arrived here
    drafts: DraftCounts = DraftCounts()  # over all tokens, sent or not

    def append(self, output: SequenceOutput) -> None:
        """Add the tokens of a step, up to the one that completes a stop string."""
        first = self.stream.first_of_text(output.new_token_ids)
        if first is not None:
            self.first_of_text = len(self.token_ids) + first
        delta = self.stream.append(output.new_token_ids, output.finish_reason)
        self._add_text(delta)
        self.token_ids += delta.token_ids
        self.all_token_ids += delta.token_ids
        self.finish_reason = delta.finish_reason
        self.times = self.times or output.times
        if output.new_token_ids:
            self.last_token_s = time.monotonic()
        if output.logprobs is not None:
            logprobs = output.logprobs[: len(delta.token_ids)]
            self.logprobs += logprobs
            self.cumulative_logprob += sum(entry.logprob for entry in logprobs)
        if output.drafts is not None:
            self.drafts = self.drafts.plus(output.drafts.limited(len(delta.token_ids)))

    def _add_text(self, delta: TextDelta) -> None:
        if self.reader is None:
            self.text.append(delta.text)
            return
        self.parsed.append(self.reader.feed(delta.text))
        if delta.finish_reason is not None:
            self.parsed.append(self.reader.finish(is_cut=self._is_cut(delta.finish_reason)))

    def _is_cut(self, reason: FinishReason) -> bool:
        """Return True if something other than the model has ended the text."""
        return reason is not FinishReason.STOP or self.stream.stopped

    @property
    def new_text(self) -> str:
        """The text that was not sent yet, without reasoning and tool calls."""
        return "".join(self.text) if self.reader is None else self.new_parts.content

    @property
    def new_parts(self) -> ResponseDelta:
        """The text, reasoning and tool calls that were not sent yet."""
        self.parsed = [ResponseDelta.joined(self.parsed)]
        return self.parsed[0]

    @property
    def metrics(self) -> dict[str, int] | None:
        """Moments up to the last token so far, and numbers of guessed tokens.

        The moments are nanoseconds of the machine's monotonic clock. None as long as there is no
        token.
        """
        if self.times is None:
            return None
        moments = zip(MOMENTS, (*self.times, self.last_token_s), strict=True)
        drafts = self.drafts
        rejected = drafts.num_predicted - drafts.num_predicted_accepted
        return {
            **{name: int(s * 1e9) for name, s in moments},
            "total_draft_tokens": drafts.num_tokens,
            "total_accepted_draft_tokens": drafts.num_accepted,
            "accepted_prediction_tokens": drafts.num_predicted_accepted,
            "rejected_prediction_tokens": rejected,
        }

    @property
    def shown_finish_reason(self) -> str:
        """The finish reason for the client: ``tool_calls`` if the model has called tools, and the
        last call is complete.
        """
        reader = self.reader
        called = reader is not None and reader.num_calls > 0 and not reader.is_inside_call
        if called and self.finish_reason is FinishReason.STOP:
            return TOOL_CALLS
        return str(self.finish_reason)

    def clear(self) -> None:
        """Drop what has been sent."""
        state = self.stream.state
        # A completion that has ended holds no text back.
        ended = self.finish_reason is not None
        self.sent = state._replace(context_ids=[], num_held=0) if ended else state
        self.text = []
        self.parsed = []
        self.token_ids = []
        self.first_of_text = None
        self.logprobs = []


class GenerationAnswer:
    """Collects new output until it is sent as one response.

    A stream that falls behind the engine therefore gets fewer and larger responses.

    Args:
        parsed: the request.
        tokenizer: tokenizer of the model.
        stream_interval: number of tokens of a completion after which a stream sends a response.
    """

    def __init__(self, parsed: ParsedRequest, tokenizer: Tokenizer, stream_interval: int) -> None:
        self.request = parsed.request
        self._options = parsed.options
        self._outputs = [
            (name, write) for name, write in _OUTPUTS.items() if name in parsed.options.wanted
        ]
        self._prompt_text = parsed.prompt_text
        self._is_text = parsed.is_text
        self._tokenizer = tokenizer
        self._stream_interval = stream_interval
        self._num_cached_tokens: int | None = None  # as the first engine reported it
        self._prompt_logprobs: list[TokenLogprobs] | None = None  # until they are sent
        self._context: list[TokenLogprobs] = []  # these and the first token's, until they are sent
        note = parsed.options.pass_through
        self._beside = 0 if note is None else sum(map(len, note.reshape(-1)))  # in each response
        self._num_bytes = self._beside + parsed.request.params.n * len(parsed.prompt_text)
        self._has_logits = False  # in the next response
        stops = Stops(tokenizer, parsed.request.params, parsed.kept_special_ids)
        number, reading_time = parsed.request.params.n, ReadingTime()
        self._completions = [
            _completion(parsed, tokenizer, stops, reading_time) for _ in range(number)
        ]
        self._num_running = number  # completions without a finish reason

    def append(self, output: SequenceOutput) -> bool:
        """Add the output of a step to its completion.

        Returns:
            Whether the text reached a stop string, so that the engine must be told to stop.
        """
        completion = self._completions[output.index]
        if completion.finish_reason is not None:
            return False  # computed before the engine was told of the stop string
        completion.append(output)
        self._measure(output)
        if self._num_cached_tokens is None:
            self._num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
            self._context = output.prompt_logprobs + (output.logprobs or [])[:1]
        if completion.finish_reason is None:
            return False
        self._num_running -= 1
        return output.finish_reason is None

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return self._num_running == 0

    @property
    def progress(self) -> list[list[int] | None]:
        """The tokens of each completion so far, to resume it; None for one that has ended."""
        return [
            completion.all_token_ids if completion.finish_reason is None else None
            for completion in self._completions
        ]

    @property
    def is_due(self) -> bool:
        """Return True if a response should be sent now."""
        if not self._options.stream:
            return self.is_finished
        return self.is_finished or any(map(self._has_enough, self._completions))

    def _has_enough(self, completion: OpenCompletion) -> bool:
        """Return True if the new tokens of a completion are the first, the last or enough."""
        is_urgent = completion.sent.num_tokens == 0 or completion.finish_reason is not None
        return len(completion.token_ids) >= (1 if is_urgent else self._stream_interval)

    def _measure(self, output: SequenceOutput) -> None:
        """Estimate the size of what an output adds to the next response."""
        self._num_bytes += _TOKEN_BYTES * len(output.new_token_ids)
        if output.logprobs is None and output.prompt_logprobs is None:
            return
        for entry in (*(output.logprobs or ()), *(output.prompt_logprobs or ())):
            self._num_bytes += LOGPROB_BYTES * (1 + len(entry.top_token_ids))
            self._has_logits |= entry.logits is not None

    @property
    def is_large(self) -> bool:
        """Return True if the next response takes long to make or to send."""
        return self._has_logits or self._num_bytes > LARGE_BYTES

    def take(self) -> dict[str, Array]:
        """Return the output tensors of the next response, and drop what they contain."""
        tensors = self._tensors()
        self._clear()
        return tensors

    def take_later(self) -> Callable[[], dict[str, Array]]:
        """Do the same, but leave the work to the result, which another thread may call."""
        taken = copy.copy(self)
        taken._completions = [copy.copy(completion) for completion in self._completions]
        self._clear()
        return taken._tensors

    def _tensors(self) -> dict[str, Array]:
        texts = (self._prompt_text + completion.new_text for completion in self._completions)
        tensors = {"text_output": as_strings(texts)}
        for name, write in self._outputs:
            tensors |= write(self, name)
        if self._options.pass_through is not None:
            tensors["pass_through"] = self._options.pass_through
        return tensors

    def _clear(self) -> None:
        """Drop what the next response contains."""
        for completion in self._completions:
            completion.clear()
        self._prompt_logprobs = None
        self._context = []
        self._num_bytes = self._beside
        self._has_logits = False

    # --- one method for each output that clients can ask for ------------------------------------

    def _finish_reasons(self, name: str) -> dict[str, Array]:
        return {name: as_strings(b.shown_finish_reason for b in self._completions)}

    def _stop_reasons(self, name: str) -> dict[str, Array]:
        # The stream may have gone on since a large response was taken.
        reasons = (b.stream.stop_string if b.finish_reason else "" for b in self._completions)
        return {name: as_strings(reasons)}

    def _tool_calls(self, name: str) -> dict[str, Array]:
        calls = ([part.as_json() for part in b.new_parts.tool_calls] for b in self._completions)
        return {name: as_strings(map(json.dumps, calls))}

    def _reasoning(self, name: str) -> dict[str, Array]:
        return {name: as_strings(b.new_parts.reasoning for b in self._completions)}

    def _cumulative_logprobs(self, name: str) -> dict[str, Array]:
        asked_for = self.request.params.logprobs is not None
        values = [b.cumulative_logprob if asked_for else math.nan for b in self._completions]
        return {name: np.array(values, np.float32)}

    def _token_logprobs(self, name: str) -> dict[str, Array]:
        if self.request.params.logprobs is None:
            return {name: as_strings(NOT_ASKED_FOR for _ in self._completions)}
        return {
            name: as_strings(
                logprobs_json(self._tokenizer, b.token_ids, b.logprobs, b.first_of_text)
                for b in self._completions
            )
        }

    def _logprobs_of_prompt(self, name: str) -> dict[str, Array]:
        if self._prompt_logprobs is None:
            return {name: as_strings([NOT_ASKED_FOR])}
        prompt, logprobs = self.request.prompt_token_ids, [None, *self._prompt_logprobs]
        entries = logprobs_json(self._tokenizer, prompt, logprobs, self._first_of_prompt())
        return {name: as_strings([entries])}

    def _first_of_prompt(self) -> int:
        """Return the index of the token with which the prompt's text begins.

        A text has no special tokens that the tokenizer has added.
        """
        if not self._is_text:
            return 0
        special = self._tokenizer.special_token_ids
        ids = enumerate(self.request.prompt_token_ids)
        return next((index for index, token_id in ids if token_id not in special), 0)

    def _context_logits(self, name: str) -> dict[str, Array]:
        return {name: _logits(self._context)}

    def _generation_logits(self, name: str) -> dict[str, Array]:
        return {name: _logits(entry for b in self._completions for entry in b.logprobs)}

    def _num_input_tokens(self, name: str) -> dict[str, Array]:
        return {name: np.asarray(len(self.request.prompt_token_ids), np.uint32)}

    def _num_cached(self, name: str) -> dict[str, Array]:
        return {name: np.array([self._num_cached_tokens or 0], np.uint32)}

    def _num_output_tokens(self, name: str) -> dict[str, Array]:
        return {name: _counts(len(completion.token_ids) for completion in self._completions)}

    def _metrics(self, name: str) -> dict[str, Array]:
        return {name: as_strings(json.dumps(b.metrics) for b in self._completions)}

    def _output_ids(self, name: str) -> dict[str, Array]:
        return {name: _flat(completion.token_ids for completion in self._completions)}

    def _context_ids(self, name: str) -> dict[str, Array]:
        states = [completion.sent for completion in self._completions]
        totals = [b.sent.num_tokens + len(b.token_ids) for b in self._completions]
        return {
            name: _flat(state.context_ids for state in states),
            "num_context_ids": _counts(len(state.context_ids) for state in states),
            "num_held_ids": _counts(state.num_held for state in states),
            "sequence_length": np.array(totals, np.int32),
        }


_OUTPUTS: dict[str, Callable[[GenerationAnswer, str], dict[str, Array]]] = {
    "finish_reason": GenerationAnswer._finish_reasons,
    "stop_reason": GenerationAnswer._stop_reasons,
    "cumulative_logprob": GenerationAnswer._cumulative_logprobs,
    "logprobs": GenerationAnswer._token_logprobs,
    "prompt_logprobs": GenerationAnswer._logprobs_of_prompt,
    "context_logits": GenerationAnswer._context_logits,
    "generation_logits": GenerationAnswer._generation_logits,
    "num_input_tokens": GenerationAnswer._num_input_tokens,
    "num_cached_tokens": GenerationAnswer._num_cached,
    "num_output_tokens": GenerationAnswer._num_output_tokens,
    "output_ids": GenerationAnswer._output_ids,
    "metrics": GenerationAnswer._metrics,
    "context_ids": GenerationAnswer._context_ids,
    "tool_calls": GenerationAnswer._tool_calls,
    "reasoning": GenerationAnswer._reasoning,
}


def _completion(
    parsed: ParsedRequest, tokenizer: Tokenizer, stops: Stops, reading_time: ReadingTime
) -> OpenCompletion:
    request = parsed.request
    stream = TextStream(
        tokenizer, request.params, parsed.kept_special_ids, request.prompt_token_ids, stops
    )
    reader = None if parsed.new_reader is None else parsed.new_reader(reading_time)
    return OpenCompletion(stream, stream.state, reader)


def _counts(values: Iterable[int]) -> Array:
    return np.array(list(values), np.uint32)


def _logits(entries: Iterable[TokenLogprobs]) -> Array:
    """Return the logits of the entries that have them: [num_entries, vocab_size] float32."""
    rows = [np.frombuffer(entry.logits, "<f4") for entry in entries if entry.logits is not None]
    return np.stack(rows) if rows else np.zeros((0, 0), np.float32)


def _flat(lists: Iterable[list[int]]) -> Array:
    return np.array([token for part in lists for token in part], np.int32)

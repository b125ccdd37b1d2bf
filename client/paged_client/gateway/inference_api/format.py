"""Writes answers of ``/inference/v1/generate``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from paged_client import Answer, Chunk, Completion, Position, TokenLogprob
from paged_client.gateway.errors import ApiError
from paged_client.gateway.events import Json, data_event
from paged_client.gateway.inference_api.schema import InferenceRequest
from paged_client.gateway.openai_format import DONE, usage_json
from paged_client.gateway.response_formats import ChatCompletionFormat, prompt_logprobs_json
from paged_client.gateway.schema.generation import StreamOptions
from paged_client.gateway.usage import Usage

_NAMES = {"input_ids": "token_ids", "prompt": "token_ids", "task": "model"}


def inference_field(name: str) -> str:
    """Return the name in the body for one of the engine's fields."""
    return _NAMES.get(name, name)


class _Part(Protocol):
    """What a chunk and a whole answer have in common."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> tuple[Position, ...]: ...
    @property
    def stop_reason(self) -> str: ...


class InferenceFormat:
    """The format of ``/inference/v1/generate``; one object per request.

    Args:
        model: name of the model in answers.
        body: the request.
    """

    field_name = staticmethod(inference_field)

    def __init__(self, model: str, body: InferenceRequest) -> None:
        self._model = model
        self._mode = body.output_mode
        self._request_id = body.request_id
        self._options = body.stream_options or StreamOptions()
        self._prompt = body.token_ids.tolist() if body.return_token_ids else None
        self._num_top = body.sampling_params.logprobs
        self._has_prompt_logprobs = body.sampling_params.prompt_logprobs is not None
        context = body.parse_context
        self._chat = ChatCompletionFormat(
            num_top=self._num_top,
            with_prompt_logprobs=False,
            with_reasoning=context is None or context.include_reasoning,
        )
        self._usage = Usage()

    def whole(self, completions: Sequence[Completion]) -> Json:
        """Return the completion as one object."""
        self._usage.count_all(completions)
        (completion,) = completions
        return {
            **self._head(),
            "model": self._model,
            "created": int(time.time()),
            "choices": [
                self._choice(index, completion, answer)
                for index, answer in enumerate(completion.answers)
            ],
            "usage": usage_json(self._usage),
            **self._prompt_fields(),
            "prompt_logprobs": (
                prompt_logprobs_json(completion.prompt_logprobs)
                if self._has_prompt_logprobs
                else None
            ),
        }

    def events(self, prompt: int, chunk: Chunk) -> bytes:
        """Return the event of a chunk, or none."""
        self._usage.count(prompt, chunk)
        choices = self._chunk_choices(chunk)
        if not choices:
            return b""
        head = self._head() | self._prompt_fields()
        self._prompt = None  # only the first event has it
        if self._options.continuous_usage_stats:
            head["usage"] = usage_json(self._usage)
        return data_event({**head, "choices": choices})

    def end(self) -> bytes:
        """Return the usage, if it was requested, and the end."""
        if not self._options.include_usage:
            return DONE
        usage = usage_json(self._usage)
        return data_event({**self._head(), "choices": [], "usage": usage}) + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error, and the end."""
        return data_event(error.body) + DONE

    def _head(self) -> Json:
        return {"request_id": self._request_id, "output_mode": self._mode}

    def _prompt_fields(self) -> Json:
        return {} if self._prompt is None else {"prompt_token_ids": self._prompt}

    def _choice(self, index: int, completion: Completion, answer: Answer) -> Json:
        if self._mode == "derender":
            return self._chat.choice(0, index, completion) | _common(answer)
        return self._plain(index, answer, answer.finish_reason)

    def _chunk_choices(self, chunk: Chunk) -> list[Json]:
        if self._mode != "derender":
            if not (chunk.token_ids or chunk.text or chunk.finish_reason):
                return []
            return [self._plain(chunk.index, chunk, chunk.finish_reason)]
        choices = self._chat.choices(0, chunk)
        if choices:  # the last one has the logprobs and the finish reason
            choices[-1] |= _common(chunk)
        return choices

    def _plain(self, index: int, part: _Part, finish_reason: str | None) -> Json:
        # The engine parses the answer of a chat, but these modes return no calls.
        reason = "stop" if finish_reason == "tool_calls" else finish_reason
        choice: Json = {"index": index, "finish_reason": reason, **_common(part)}
        if self._mode == "text":
            return {**choice, "text": part.text, "logprobs": self._chat.logprobs(part.logprobs)}
        return {**choice, "logprobs": self._token_logprobs(part.logprobs)}

    def _token_logprobs(self, positions: Iterable[Position]) -> Json | None:
        if self._num_top is None:
            return None
        content = [
            {**_by_id(position[0]), "top_logprobs": list(map(_by_id, position))}
            for position in positions
        ]
        return {"content": content}


def _common(part: _Part) -> Json:
    return {"token_ids": list(part.token_ids), "stop_reason": part.stop_reason or None}


def _by_id(token: TokenLogprob) -> Json:
    return {"token_id": token.token_id, "logprob": token.logprob, "rank": token.rank}

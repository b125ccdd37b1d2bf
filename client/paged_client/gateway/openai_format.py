"""The object around the choices of chat and text completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from paged_client import Chunk, Completion
from paged_client.gateway.errors import ApiError, openai_field
from paged_client.gateway.events import Json, data_event
from paged_client.gateway.response_formats import ChoiceFormat
from paged_client.gateway.schema.generation import StreamOptions
from paged_client.gateway.usage import Usage
from paged_client.gateway.version import VERSION

DONE = b"data: [DONE]\n\n"
_FINGERPRINT = f"paged-backend-{VERSION}"


class ChoicesFormat:
    """The format of ``/v1/chat/completions`` and ``/v1/completions``; one object per request."""

    field_name = staticmethod(openai_field)

    def __init__(
        self, model: str, choices: ChoiceFormat, options: StreamOptions | None = None
    ) -> None:
        self._choices = choices
        self._options = options or StreamOptions()
        self._usage = Usage(choices.counts_output)
        self._id = choices.id_prefix + uuid.uuid4().hex
        self._created = int(time.time())
        self._model = model

    def whole(self, completions: Sequence[Completion]) -> Json:
        """Return the completions as one object."""
        self._usage.count_all(completions)
        choices = [
            self._choices.choice(prompt, index, completion)
            for prompt, completion in enumerate(completions)
            for index in range(len(completion.answers))
        ]
        return {
            **self._head(self._choices.whole_object),
            "choices": choices,
            "usage": usage_json(self._usage),
            **self._choices.extras(completions),
        }

    def events(self, prompt: int, chunk: Chunk) -> bytes:
        """Return an event for each choice of a chunk."""
        self._usage.count(prompt, chunk)
        head = self._head(self._choices.chunk_object)
        if self._options.continuous_usage_stats:
            head["usage"] = usage_json(self._usage)
        elif self._options.include_usage:
            head["usage"] = None
        choices = self._choices.choices(prompt, chunk)
        return b"".join(data_event({**head, "choices": [choice]}) for choice in choices)

    def end(self) -> bytes:
        """Return the usage, if it was requested, and the end."""
        if not self._options.include_usage:
            return DONE
        head = self._head(self._choices.chunk_object)
        return data_event({**head, "usage": usage_json(self._usage), "choices": []}) + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the event of an error, and the end."""
        return data_event(error.body) + DONE

    def _head(self, object_name: str) -> Json:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": _FINGERPRINT,
        }


def usage_json(usage: Usage) -> Json:
    """Return the usage in OpenAI's format."""
    values: Json = {
        "prompt_tokens": usage.num_input_tokens,
        "completion_tokens": usage.num_output_tokens,
        "total_tokens": usage.num_input_tokens + usage.num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
    }
    if (predicted := usage.prediction_tokens) is not None:
        values["completion_tokens_details"] = {
            "accepted_prediction_tokens": predicted.accepted,
            "rejected_prediction_tokens": predicted.rejected,
        }
    return values

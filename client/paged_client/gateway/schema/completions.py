"""The body of ``/v1/completions``."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from pydantic import Field, PlainValidator, PrivateAttr

from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.body import INT32_MAX, given
from paged_client.gateway.schema.generation import MAX_LOGPROBS, MAX_N, GenerateRequest
from paged_client.gateway.schema.prompts import MAX_ALLOWED_IDS, TextOrIds, prompts

MAX_PROMPTS = 256

# Objects of any size that the engine reads as text, too.
_CONSTRAINTS = ("structured_outputs", "response_format", "guided_decoding", "guided_json")


def _encoded(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ApiError.field(name, str(error)) from None


class CompletionRequest(GenerateRequest):
    """The body of ``/v1/completions``."""

    prompt: Annotated[
        list[TextOrIds],
        PlainValidator(
            partial(prompts, "prompt", MAX_PROMPTS),
            json_schema_input_type=str | list[str] | list[int] | list[list[int]],
        ),
    ]
    max_tokens: int | None = Field(16, ge=0, le=INT32_MAX)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=MAX_N)
    add_special_tokens: bool = True
    _constraints: dict[str, str] = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields; encode those on the output, for all prompts at once."""
        super().model_post_init(context)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise ApiError.field("best_of", "is not supported yet, except for the value of n")
        if self.max_tokens == 0 and not self.echo:
            raise ApiError.field("max_tokens", "must be at least 1, except for echo: true")
        if len(self.prompt) * len(self.allowed_token_ids or ()) > MAX_ALLOWED_IDS:
            raise ApiError.field(
                "allowed_token_ids", f"at most {MAX_ALLOWED_IDS} for all prompts together"
            )
        if len(self.prompt) * (self.n or 1) > MAX_PROMPTS:
            raise ApiError.field("n", f"at most {MAX_PROMPTS} answers to all prompts together")
        self._constraints = {
            name: _encoded(name, value)
            for name, value in given(self, _CONSTRAINTS).items()
            if isinstance(value, dict)
        }

    def engine_fields(self) -> dict[str, Any]:
        """Return the engine's fields; it generates a token even if only the prompt is wanted."""
        values = super().engine_fields() | self._constraints
        values["max_tokens"] = 16 if self.max_tokens is None else max(self.max_tokens, 1)
        if self.logprobs is not None:
            values["logprobs"] = self.logprobs
            if self.echo:
                values["prompt_logprobs"] = max(self.logprobs, self.prompt_logprobs or 0)
        return values

"""The bodies of ``/inference/v1``."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.body import INT32_MAX, MessageBody, RequestBody, given
from paged_client.gateway.schema.chat_messages import MAX_TOOLS
from paged_client.gateway.schema.generation import (
    CACHE_HIT_THRESHOLD,
    MAX_LOGPROBS,
    SPECULATE,
    EngineFields,
    GenerateParams,
    StreamOptions,
    check_prompt_logprobs,
    list_of_one,
)
from paged_client.gateway.schema.prompts import TokenIds

MAX_ABORTED = 1024
RequestId = Annotated[str, Field(min_length=1, max_length=256)]
OutputMode = Literal["tokens", "text", "derender"]


class TokenSampling(GenerateParams):
    """vLLM's ``sampling_params``."""

    ignored: ClassVar[frozenset[str]] = GenerateParams.ignored | {
        *("detokenize", "output_kind", "skip_clone", "skip_reading_prefix_cache"),
    }
    not_supported: ClassVar[Mapping[str, Any]] = {
        **{name: v for name, v in GenerateParams.not_supported.items() if name != "detokenize"},
        "extra_args": {},
    }
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    def sampling_fields(self) -> dict[str, Any]:
        """Return the engine's fields; without a limit a completion may fill the context."""
        values = super().sampling_fields() | given(self, ("logprobs",))
        return {**values, "max_tokens": self.max_tokens}


class ParseContext(MessageBody):
    """What a rendered chat says about its answer; other fields of vLLM's are ignored."""

    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True

    def tool_fields(self) -> dict[str, Any]:
        """Return the engine's fields; a choice without tools says nothing."""
        return given(self, TOOL_FIELDS) if self.tools else {}


TOOL_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")


class InferenceRequest(EngineFields):
    """The body of ``/inference/v1/generate``, which the routes ``/render`` return."""

    ignored: ClassVar[frozenset[str]] = EngineFields.ignored | {
        *("token_offsets", "reasoning_ended", "reasoning_parser_kwargs"),
    }
    not_supported: ClassVar[Mapping[str, Any]] = {
        **EngineFields.not_supported,
        **dict.fromkeys(("features", "content_parts")),
    }
    request_id: RequestId = Field(default_factory=lambda: uuid.uuid4().hex)
    token_ids: TokenIds
    sampling_params: TokenSampling = Field(default_factory=lambda: TokenSampling.model_validate({}))
    stream: bool = False
    stream_options: StreamOptions | None = None
    output_mode: OutputMode = "tokens"
    parse_context: ParseContext | None = None
    return_token_ids: bool = False
    cache_hit_threshold: float | None = CACHE_HIT_THRESHOLD
    speculate: bool | None = SPECULATE
    prediction: str | None = None

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields."""
        if not self.token_ids:
            raise ApiError.field("token_ids", "is empty; at least one token is needed")
        check_prompt_logprobs(self.sampling_params.prompt_logprobs, stream=self.stream)

    @property
    def is_parsed(self) -> bool:
        """Whether the engine parses the answer.

        A chat must get the same token ids as at ``/v1/chat/completions``, where the engine knows
        that reasoning and calls may come before a constrained text.
        """
        is_chat = self.parse_context is not None
        return self.output_mode == "derender" or (self.output_mode == "tokens" and is_chat)

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields that the engine takes under the same names."""
        tools = {} if self.parse_context is None else self.parse_context.tool_fields()
        own = super().engine_fields() | given(
            self, ("cache_hit_threshold", "speculate", "prediction")
        )
        return own | self.sampling_params.sampling_fields() | tools


class AbortRequest(RequestBody):
    """The body of ``/inference/v1/abort_requests``."""

    request_ids: Annotated[
        list[RequestId],
        Field(max_length=MAX_ABORTED, fail_fast=True),
        BeforeValidator(list_of_one, json_schema_input_type=str | list[str]),
    ]

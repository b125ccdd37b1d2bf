"""Fields of requests for new tokens, which the APIs share; most are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from paged_client.gateway.errors import ApiError
from paged_client.gateway.schema.body import INT32_MAX, RequestBody, given
from paged_client.gateway.schema.chat_messages import MAX_PARTS
from paged_client.gateway.schema.prompts import AllowedIds, TokenId

MAX_N = 64
MAX_BEAM_WIDTH = 16
MAX_STOP_STRINGS = 256  # the engine's option max_stop_strings is 16 by default
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_CHOICES = 4096
_NO_SEED = -1  # as in vLLM; the 64 bits of other negative seeds are read as an unsigned number


def list_of_one(value: Any) -> Any:
    """Return a list with a string; other values are returned as they are."""
    return [value] if isinstance(value, str) else value


def _few_biases(value: Any) -> Any:
    """Refuse a large object before pydantic creates an error for each of its fields."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", f"must have at most {MAX_BIASES} fields")
    return value


StopString = Annotated[str, Field(min_length=1, max_length=256)]
StopStrings = Annotated[
    list[StopString],
    Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
    BeforeValidator(list_of_one, json_schema_input_type=str | list[str]),
]
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,10}$")]
Bias = Annotated[float, Field(ge=-100, le=100)]
BadWord = Annotated[str, Field(min_length=1, max_length=64)]


class StreamOptions(RequestBody):
    """Additional information in a stream; a whole answer has its usage in any case."""

    not_supported: ClassVar[Mapping[str, Any]] = {"include_obfuscation": False}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class EngineFields(RequestBody):
    """Fields of every request that goes to the engine."""

    model: str | None = Field(None, max_length=256, description="may be left out if it is the only")
    priority: int | None = Field(None, ge=-(2**31), le=INT32_MAX)
    cache_salt: str | None = Field(None, min_length=1, max_length=256)
    tenant: str | None = Field(None, max_length=256, description="only without API keys")
    timeout_s: float | None = Field(None, gt=0, le=86400)

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields that the engine takes under the same names."""
        return given(self, _ENGINE_FIELDS)


_ENGINE_FIELDS = tuple(name for name in EngineFields.model_fields if name != "model")


class SamplingParams(RequestBody):
    """Parameters of sampling, which all APIs share; most are vLLM's."""

    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    top_p: float | None = Field(None, gt=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    min_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = Field(None, max_length=256, fail_fast=True)
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], BeforeValidator(_few_biases)] | None = None
    allowed_token_ids: AllowedIds | None = None
    bad_words: list[BadWord] | None = Field(None, max_length=128, fail_fast=True)
    # The engine reads it; an object or its text.
    structured_outputs: dict[str, Any] | str | None = None
    thinking_token_budget: int | None = Field(
        None, ge=-1, le=INT32_MAX, description="-1 for no limit"
    )
    beam_width: int | None = Field(None, ge=1, le=MAX_BEAM_WIDTH)
    length_penalty: float | None = Field(None, ge=-4, le=4)
    early_stopping: bool | Literal["never"] | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """Return the parameters that the engine takes under the same names."""
        values = given(self, _SAMPLING_PARAMS)
        values.pop("seed", None)
        if self.seed is not None and self.seed != _NO_SEED:
            values["seed"] = self.seed % 2**64
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = self.allowed_token_ids.tolist()
        return values


_SAMPLING_PARAMS = tuple(SamplingParams.model_fields)


class GenerateParams(SamplingParams):
    """Parameters of sampling that chats and completions have in common."""

    n: int | None = Field(None, ge=1, le=MAX_N)
    use_beam_search: bool | None = Field(None, description="with n as the width")
    stop: StopStrings | None = None
    stop_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    # The engine reads these; each is an object, some also its text.
    response_format: dict[str, Any] | None = None
    guided_decoding: dict[str, Any] | str | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = Field(None, max_length=MAX_CHOICES, fail_fast=True)
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = Field(None, max_length=256)
    guided_decoding_guide_type: str | None = Field(None, max_length=64)
    guided_decoding_guide: str | None = None

    def sampling_fields(self) -> dict[str, Any]:
        """Return the parameters that the engine takes under the same names."""
        return super().sampling_fields() | given(self, _GENERATE_PARAMS)


_GENERATE_PARAMS = tuple(
    name for name in GenerateParams.model_fields if name not in SamplingParams.model_fields
)


class SamplingFields(SamplingParams, EngineFields):
    """Fields of every request for new tokens."""

    stream: bool = False

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields that the engine takes under the same names."""
        return super().engine_fields() | self.sampling_fields()


CACHE_HIT_THRESHOLD: Any = Field(
    None, ge=0, le=1, description="fraction of the prompt that must be cached on arrival"
)


SPECULATE: Any = Field(None, description="false: guess no tokens of this answer")


class PredictedPart(RequestBody):
    """A part of a predicted text."""

    type: Literal["text"]
    text: str


class Prediction(RequestBody):
    """A text that an answer may repeat."""

    type: Literal["content"]
    content: str | Annotated[list[PredictedPart], Field(max_length=MAX_PARTS, fail_fast=True)]

    @property
    def text(self) -> str:
        """The whole text."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class GenerateRequest(GenerateParams, SamplingFields):
    """Fields common to chat and completion requests."""

    stream_options: StreamOptions | None = None
    cache_hit_threshold: float | None = CACHE_HIT_THRESHOLD
    speculate: bool | None = SPECULATE
    prediction: Prediction | None = None

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields."""
        check_prompt_logprobs(self.prompt_logprobs, stream=self.stream)

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields that the engine takes under the same names."""
        values = super().engine_fields() | given(self, ("cache_hit_threshold", "speculate"))
        if self.prediction is not None:
            values["prediction"] = self.prediction.text
        return values


def check_prompt_logprobs(prompt_logprobs: int | None, *, stream: bool) -> None:
    """Raise ApiError for log-probabilities of a prompt in a stream."""
    if prompt_logprobs is not None and stream:
        raise ApiError.field("prompt_logprobs", "is only for stream: false")

"""Request bodies: OpenAI's fields, vLLM's additional ones, and a limit on each."""

from __future__ import annotations

import difflib
import json
import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    PrivateAttr,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from paged_client.gateway.errors import ApiError
from paged_client.gateway.reasoning_parts import OWN_ERROR, field_problem, reasoning_text
from paged_client.gateway.routing import Ids, RoutedPrompt

MAX_DEPTH = 32
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_DOCUMENTS = 1024
MAX_PROMPTS = 256
MAX_N = 64
MAX_STOP_STRINGS = 256  # the engine's option max_stop_strings is 16 by default
MAX_LOGPROBS = 20
MAX_BIASES = 1024
MAX_CHOICES = 4096
MAX_TOOLS = 512
MAX_IDS = 2**20
MAX_ALLOWED_IDS = 2**18
MAX_NAME_LENGTH = 64  # longer field names are truncated in errors and get no suggestion
INT32_MAX = 2**31 - 1
_NO_SEED = -1  # vLLM's; other negative seeds are those with the same 64 bits

_PIECE = 2**14  # ids checked at a time, while no other thread can run
_WORDS = re.compile(r"^\w+ should")  # how pydantic's messages begin

# Fields that have no meaning here; ignoring them does not change the completions.
_IGNORED = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"),
        *("spaces_between_special_tokens", "request_id", "session_id"),
    )
)
# Unsupported fields that would change the response, each with its no-op value (None if none).
_NOT_SUPPORTED: dict[str, Any] = {
    **dict.fromkeys(("tools", "functions"), []),
    **dict.fromkeys(("tool_choice", "function_call"), "none"),
    **dict.fromkeys(("audio", "prediction", "web_search_options", "moderation"), None),
    **dict.fromkeys(("media_io_kwargs", "mm_processor_kwargs", "mm_payload"), {}),
    "documents": [],
    **dict.fromkeys(("chat_template", "truncate_prompt_tokens", "prompt_embeds"), None),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params"), {}),
    "truncation_side": None,
    **dict.fromkeys(("use_beam_search", "early_stopping", "return_token_strs"), False),
    **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), False),
    **dict.fromkeys(("return_prompt_text", "return_token_offsets", "return_mm_kwargs"), False),
    **dict.fromkeys(("echo", "watermarking", "flat_logprobs"), False),
    **dict.fromkeys(("logits_processors", "logprob_token_ids"), []),
    **dict.fromkeys(("vllm_xargs", "repetition_detection"), {}),
    "detokenize": True,
    "routed_experts_prompt_start": 0,
    "guided_decoding_backend": "auto",
    "modalities": ["text"],
    "verbosity": "medium",
    **dict.fromkeys(("best_of", "beam_width"), 1),
    "length_penalty": 1.0,
    "suffix": "",
}


class RequestBody(BaseModel):
    """A JSON object that may have only known fields; null means that a field is absent."""

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )
    ignored: ClassVar[frozenset[str]] = _IGNORED
    not_supported: ClassVar[Mapping[str, Any]] = _NOT_SUPPORTED

    @model_validator(mode="before")
    @classmethod
    def _sort_out(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = {name: value for name, value in body.items() if value is not None}
        known = cls.model_fields
        for name in [name for name in fields if name not in known]:
            value = fields.pop(name)
            if name in cls.not_supported:
                neutral = cls.not_supported[name]
                if neutral is None or value != neutral:
                    exception = f", except {json.dumps(neutral)}" if neutral else ""
                    raise field_problem(name, f"is not supported yet{exception}")
            elif not cls._is_ignored(name):
                raise field_problem(short(name), f"is not known{_hint(name, known)}")
        return fields

    @classmethod
    def _is_ignored(cls, name: str) -> bool:
        return name in cls.ignored


class MessageBody(RequestBody):
    """An object of a conversation.

    Its unknown fields are ignored, as in vLLM: clients send answers back with what any server and
    library wrote into them. Fields that would change the prompt are refused by name.
    """

    model_config = ConfigDict(extra="ignore")
    not_supported: ClassVar[Mapping[str, Any]] = {}

    @classmethod
    def _is_ignored(cls, name: str) -> bool:
        return True


def _hint(name: str, known: Iterable[str]) -> str:
    """Suggest the most similar known name; none for long names, as matching would take seconds."""
    if len(name) > MAX_NAME_LENGTH:
        return ""
    near = difflib.get_close_matches(name, known, n=1)
    return f", did you mean {near[0]}?" if near else ""


def short(text: str) -> str:
    """Return a name for an error message, as printable ASCII of limited length."""
    if not text:
        return '""'
    shown = ascii(text[: MAX_NAME_LENGTH + 1])[1:-1]
    return shown if len(shown) <= MAX_NAME_LENGTH else shown[: MAX_NAME_LENGTH - 3] + "..."


def list_of_one(value: Any) -> Any:
    """Return a list with a string; other values are returned as they are."""
    return [value] if isinstance(value, str) else value


def _few_biases(value: Any) -> Any:
    """Refuse a large object before pydantic creates an error for each of its fields."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", f"must have at most {MAX_BIASES} fields")
    return value


def token_ids(value: Any) -> Ids | None:
    """Convert a list of token ids to 32-bit integers; return None for any other value."""
    if not isinstance(value, list):
        return None
    ids = array("i")
    for start in range(0, len(value), _PIECE):
        piece = value[start : start + _PIECE]
        # bool is a subclass of int, but true is not a token id.
        if set(map(type, piece)) != {int} or not 0 <= min(piece) <= max(piece) <= INT32_MAX:
            return None
        ids.extend(piece)
    return ids


def _ids_up_to(limit: int) -> Callable[[Any], Ids]:
    problem = f"must be a list of at most {limit} integers from 0 to {INT32_MAX}"

    def check(value: Any) -> Ids:
        ids = token_ids(value)
        if ids is None or len(ids) > limit:
            raise PydanticCustomError("token_ids", "{problem}", {"problem": problem})
        return ids

    return check


TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
# Long lists are checked in C: pydantic would create an error for each invalid item.
TokenIds = Annotated[
    Ids,
    PlainValidator(_ids_up_to(MAX_IDS), json_schema_input_type=list[TokenId]),
]
AllowedIds = Annotated[
    Ids,
    PlainValidator(_ids_up_to(MAX_ALLOWED_IDS), json_schema_input_type=list[TokenId]),
]
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


class SamplingFields(EngineFields):
    """Fields of every request for new tokens; most are vLLM's."""

    stream: bool = False
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

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields that the engine takes under the same names."""
        values = super().engine_fields() | given(self, _SAMPLING_FIELDS)
        values.pop("seed", None)
        if self.seed is not None and self.seed != _NO_SEED:
            values["seed"] = self.seed % 2**64
        if self.allowed_token_ids is not None:
            values["allowed_token_ids"] = self.allowed_token_ids.tolist()
        return values


_SAMPLING_FIELDS = tuple(
    name
    for name in SamplingFields.model_fields
    if name not in EngineFields.model_fields and name != "stream"
)


def given(body: BaseModel, names: Iterable[str]) -> dict[str, Any]:
    """Return those of the fields that a body has."""
    values = {name: getattr(body, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


class GenerateRequest(SamplingFields):
    """Fields common to chat and completion requests."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
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

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields."""
        if self.prompt_logprobs is not None and self.stream:
            raise ApiError.field("prompt_logprobs", "is only for stream: false")

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields that the engine takes under the same names."""
        return super().engine_fields() | given(self, _GENERATE_FIELDS)


_GENERATE_FIELDS = tuple(
    name
    for name in GenerateRequest.model_fields
    if name not in SamplingFields.model_fields and name != "stream_options"
)


# Objects of any size that the engine reads as text, too.
_CONSTRAINTS = ("structured_outputs", "response_format", "guided_decoding", "guided_json")


def _encoded(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError as error:
        raise ApiError.field(name, str(error)) from None


_REASONING_PARTS = ("thinking", "reasoning", "reasoning_text")


class TextPart(MessageBody):
    """A text part of a message, or a part of an earlier answer."""

    not_supported: ClassVar[Mapping[str, Any]] = dict.fromkeys(
        ("image_url", "input_audio", "file", "video_url", "audio_url")
    )
    type: Literal[
        "text", "input_text", "output_text", "refusal", "thinking", "reasoning", "reasoning_text"
    ]
    text: str | None = None
    refusal: str | None = None
    thinking: str | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _check_text(cls, value: Any, read: Callable[[Any], TextPart]) -> TextPart:
        """Take a bare text, too, and a text of null, which says nothing; but not no text at all."""
        if isinstance(value, str):
            value = {"type": "text", "text": value}
        elif isinstance(value, dict) and value.get("type") in _REASONING_PARTS:
            value = _reasoning_part(value["type"], reasoning_text(value))
        part = read(value)
        if part.is_empty and part.field not in value:
            raise field_problem(part.field, "is missing")
        return part

    @property
    def field(self) -> str:
        """The name of the field that has the text."""
        return self.type if self.type in ("refusal", "thinking") else "text"

    @property
    def is_empty(self) -> bool:
        """True if the text is null."""
        return getattr(self, self.field) is None

    def as_json(self) -> dict[str, Any]:
        """Return the part in the engine's format."""
        return {"type": self.type, **given(self, ("text", "refusal", "thinking"))}


def _reasoning_part(kind: str, text: str | None) -> dict[str, Any]:
    """Return a part of reasoning in one form; its text is null if it says nothing."""
    field = "thinking" if kind == "thinking" else "text"
    return {"type": kind, **({} if text is None else {field: text or None})}


def _content_kind(content: Any) -> str:
    return "(parts)" if isinstance(content, list) else "(text)"


Content = Annotated[
    Annotated[str, Tag("(text)")]
    | Annotated[list[TextPart], Field(max_length=MAX_PARTS, fail_fast=True), Tag("(parts)")],
    Discriminator(_content_kind),
]


class CalledFunction(MessageBody):
    """The function of a call in the history."""

    name: str = Field(min_length=1, max_length=128)
    # Incomplete JSON if the call was cut; the engine reads it.
    arguments: str | dict[str, Any] = ""


class MessageToolCall(MessageBody):
    """A call in the history."""

    id: str | None = Field(None, max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_json(self) -> dict[str, Any]:
        """Return the call in the engine's format."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {**given(self, ("id",)), "type": self.type, "function": function}


class Message(MessageBody):
    """One turn of a conversation."""

    not_supported: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("function_call", "audio")),
        **dict.fromkeys(("images", "videos", "files"), []),
    }
    role: str = Field(min_length=1, max_length=64)
    content: Content | None = None
    name: str | None = Field(None, max_length=256)
    tool_calls: list[MessageToolCall] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_call_id: str | None = Field(None, max_length=256)
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = Field(None, description="is the content if there is no other")

    @model_validator(mode="after")
    def _check_content(self) -> Message:
        # An answer may end before its text begins, and a tool may return nothing.
        if self.content is None and self.role not in ("assistant", "tool") and not self.tool_calls:
            raise field_problem("content", "is missing")
        return self

    def as_json(self) -> dict[str, Any]:
        """Return the message in the engine's format."""
        content: Any = self.refusal if self.content is None else self.content
        if isinstance(content, list):
            content = [part.as_json() for part in content if not part.is_empty]
        message = {"role": self.role, "content": content}
        if self.tool_calls:
            message["tool_calls"] = [call.as_json() for call in self.tool_calls]
        reasoning = self.reasoning_content if self.reasoning is None else self.reasoning
        optional = {
            "name": self.name,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": reasoning,
        }
        return message | {name: value for name, value in optional.items() if value is not None}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatOptions(RequestBody):
    """Options for rendering messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, max_length=64)
    reasoning_effort: str | None = Field(None, max_length=64)
    # The engine checks whether the model's template takes them.
    documents: list[dict[str, Any]] | None = Field(None, max_length=MAX_DOCUMENTS, fail_fast=True)


def chat_prompt(messages: Sequence[Message], options: ChatOptions) -> dict[str, Any]:
    """Return messages and their options in the engine's format."""
    return {
        "messages": [message.as_json() for message in messages],
        **{
            name: value
            for name, value in given(options, ChatOptions.model_fields).items()
            if name != "documents" or value
        },
    }


class ChatRequest(GenerateRequest, ChatOptions):
    """The body of ``/v1/chat/completions``."""

    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: Literal[False] | None = Field(None, description="the template adds them")
    # The engine reads these, too.
    tools: list[dict[str, Any]] | None = Field(None, max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool = True
    _prompt: dict[str, Any] = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields; build the prompt, for a large body in its thread."""
        super().model_post_init(context)
        if self.top_logprobs and not self.logprobs:  # 0 asks for none, as in vLLM
            raise ApiError.field("top_logprobs", "is only for logprobs: true")
        self._prompt = chat_prompt(self.messages, self)

    def routed(self) -> RoutedPrompt:
        """Return the prompt."""
        return self._prompt

    def engine_fields(self) -> dict[str, Any]:
        """Return the engine's fields; without a limit a completion may fill the context."""
        limits = (self.max_completion_tokens, self.max_tokens)
        values = super().engine_fields()
        values["max_tokens"] = next((limit for limit in limits if limit is not None), None)
        if self.logprobs:
            values["logprobs"] = self.top_logprobs or 0
        return values | self._tools()

    def _tools(self) -> dict[str, Any]:
        if not self.tools:
            # What a choice may be without tools is the engine's decision.
            return {} if self.tool_choice is None else {"tool_choice": self.tool_choice}
        return given(self, ("tools", "tool_choice", "parallel_tool_calls"))


TextOrIds: TypeAlias = str | Ids


def prompts(name: str, max_number: int, value: Any) -> list[TextOrIds]:
    """Return the prompts in the field ``name``; a single prompt becomes a list of one.

    Raises ApiError.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if len(value) > max_number and not isinstance(value[0], int):
            raise ApiError.field(name, f"at most {max_number} prompts, got {len(value)}")
        if all(isinstance(item, str) for item in value):
            return value
        several = [value] if isinstance(value[0], int) else value
        ids = [found for found in map(token_ids, several) if found]
        if len(ids) == len(several):
            return list(ids)
    raise ApiError.field(name, "must be a text, token ids, or a list of either")


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


class TokenizeRequest(ChatOptions):
    """The body of ``/tokenize``: a prompt or messages."""

    model: str | None = Field(None, max_length=256)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    _prompt: str | dict[str, Any] = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Check constraints between fields."""
        if (self.prompt is None) == (self.messages is None):
            raise ApiError.field("prompt", "give either prompt or messages")
        if self.messages is not None and self.add_special_tokens:
            raise ApiError.field("add_special_tokens", "is only for prompt: the template adds them")
        self._prompt = self.prompt or ""
        if self.messages is not None:
            self._prompt = chat_prompt(self.messages, self)

    def routed(self) -> RoutedPrompt:
        """Return the prompt to tokenize."""
        return self._prompt


class DetokenizeRequest(RequestBody):
    """The body of ``/detokenize``."""

    model: str | None = Field(None, max_length=256)
    tokens: TokenIds


def describe(error: ValidationError) -> ApiError:
    """Convert the first of pydantic's errors about a body."""
    first = error.errors(include_url=False, include_input=False)[0]
    location = first["loc"]
    if first["type"] == OWN_ERROR:
        location = (*location, first["ctx"]["name"])
    problem = _WORDS.sub("must", first["msg"]).replace("Field required", "is missing")
    return ApiError.field(_path(location), problem[0].lower() + problem[1:])


def _path(location: Sequence[str | int]) -> str:
    """Return ``messages[0].content`` for ``("messages", 0, "content", "(text)")``."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(("(", "[")):  # pydantic's own names, not fields
            path += f".{short(part)}" if path else part
    return path

"""Any request body: unknown, ignored and unsupported fields, and how an error names a field."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from paged_client.gateway.errors import ApiError
from paged_client.gateway.reasoning_parts import OWN_ERROR, field_problem

INT32_MAX = 2**31 - 1
MAX_DEPTH = 32
MAX_NAME_LENGTH = 64  # longer field names are truncated in errors and get no suggestion
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


def given(body: BaseModel, names: Iterable[str]) -> dict[str, Any]:
    """Return the part of the fields that a body has."""
    values = {name: getattr(body, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


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

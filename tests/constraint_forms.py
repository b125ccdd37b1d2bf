"""All forms in which a request can give one constraint, for the tests of every interface."""

from __future__ import annotations

import json
from typing import Any

# What vLLM's own classes hold besides the constraint, as Triton's OpenAI frontend sends it.
_UNSET = {
    **dict.fromkeys(("regex", "choice", "grammar", "json_object", "whitespace_pattern")),
    **{"backend": None, "structural_tag": None, "disable_fallback": False},
    **{"disable_any_whitespace": False, "disable_additional_properties": False},
}


def forms_of(schema: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of a request by the name of the form; they all mean the same."""
    text = json.dumps(schema)
    return {
        "vllm": {"structured_outputs": {"json": schema}},
        "vllm as text": {"structured_outputs": json.dumps({"json": schema})},
        "vllm with a text": {"structured_outputs": {"json": text}},
        "vllm's own class": {
            "structured_outputs": {**_UNSET, "_backend": None, "_backend_was_auto": False}
            | {"json": schema}
        },
        "vllm before 0.12": {"guided_decoding": {"json": schema}},
        "vllm before 0.12 as text": {"guided_decoding": json.dumps(_UNSET | {"json": schema})},
        "older vllm": {"guided_json": schema},
        "older vllm as text": {"guided_json": text, "guided_regex": None},
        "openai": {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "strict": True, "schema": schema},
            }
        },
        "tensorrtllm": {
            "guided_decoding_guide_type": "json_schema",
            "guided_decoding_guide": text,
        },
    }

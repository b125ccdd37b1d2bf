"""Parameters of other servers that this engine lacks: a neutral value is the same as none.

Clients often send every parameter that they know, most of them with values that change nothing.
Such a value is dropped. Any other value is refused by name, because it would have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from paged_backend.values.validation import Refuse, from_string, shorten

Neutral: TypeAlias = tuple[tuple[object, ...], str]
"""The neutral values of a parameter besides null, the preferred one first; why others are refused.
"""

_CODE = "no code of a client is run"
_ROUTES = "the experts that a token was sent to are not returned"
_NO_DETECTION = dict.fromkeys(("max_pattern_size", "min_pattern_size", "min_count"), 0)
_LOGPROBS = "logprobs and prompt_logprobs choose the tokens"

# The fields of vLLM's SamplingParams, BeamSearchParams and requests from 0.2 to 0.32 that have no
# counterpart here.
SAMPLING: dict[str, Neutral] = {
    "logits_processors": (([],), _CODE),
    **dict.fromkeys(("extra_args", "vllm_xargs"), (({},), _CODE)),
    "detokenize": ((True,), "return_output_ids returns token ids in addition to the text"),
    "output_kind": ((0,), "stream chooses what the responses hold"),
    "output_text_buffer_length": ((0,), "it follows from the stop strings"),
    "stream_interval": ((), "it is an option of the server"),
    "truncate_prompt_tokens": ((), "a prompt that is too long is refused"),
    "truncation_side": ((), "a prompt that is too long is refused"),
    "logprob_token_ids": (([],), _LOGPROBS),
    "prompt_logprob_token_ids": (([],), _LOGPROBS),
    "prompt_logprob_start": ((0,), _LOGPROBS),
    "flat_logprobs": ((False,), "log-probabilities have one format"),
    "skip_clone": ((False,), "parameters never change"),
    "skip_reading_prefix_cache": ((False,), "a cache_salt shares no blocks with other requests"),
    "watermarking": ((False,), "outputs have no watermark"),
    "repetition_detection": (({}, _NO_DETECTION), "the penalties make repetitions rarer"),
    "routed_experts_prompt_start": ((0,), _ROUTES),
    "trace_decode_token_ids": (([],), "tokens are always sampled"),
    "guided_decoding_backend": (("auto", "guidance"), "constraints are enforced by llguidance"),
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params"), (({},), "one engine does it all")
    ),
}
# The fields of vLLM's GuidedDecodingParams and StructuredOutputsParams of the same kind.
STRUCTURED: dict[str, Neutral] = {
    **dict.fromkeys(("backend", "_backend"), SAMPLING["guided_decoding_backend"]),
    **dict.fromkeys(("backend_was_auto", "_backend_was_auto"), ((False, True), "is vLLM's own")),
    "disable_fallback": ((False, True), "there is no other backend"),
}


def without_neutral(
    values: Mapping[str, Any], table: Mapping[str, Neutral], refuse: Refuse
) -> dict[str, Any]:
    """Return the values without the parameters of a table.

    Args:
        values: values by name, as a client gave them. A text can stand for a number or a truth
            value.
        table: the parameters that this engine lacks.
        refuse: makes the error for a value that is not neutral, which is raised.
    """
    kept = {}
    for name, value in values.items():
        if name not in table:
            kept[name] = value
            continue
        neutral, reason = table[name]
        if not _is_one_of(value, neutral):
            wanted = " or ".join([*map(_as_json, neutral), "null"][:2])
            raise refuse(name, f"must be {wanted}, got {shorten(value)}: {reason}")
    return kept


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    if value is None:
        return True
    if isinstance(value, str) and neutral and not isinstance(neutral[0], (str, list, dict)):
        value = from_string(type(neutral[0]), value)
    is_truth = isinstance(value, bool)  # 1 is not true
    return any(isinstance(one, bool) == is_truth and one == value for one in neutral)


def _as_json(value: object) -> str:
    return str(value).lower()

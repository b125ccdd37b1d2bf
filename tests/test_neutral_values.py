"""Parameters of vLLM that this engine lacks: neutral values mean nothing, others are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paged_backend import InvalidRequest, SamplingParams
from paged_backend.values.request import RequestOptions

# vLLM's defaults from 0.2 to 0.32, as JSON.
DEFAULTS: dict[str, Any] = {
    **{"n": 1, "best_of": 1, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0},
    **{"seed": None, "use_beam_search": False, "length_penalty": 1.0, "early_stopping": False},
    **{"stop": None, "stop_token_ids": None, "bad_words": None, "ignore_eos": False},
    **{"max_tokens": 16, "min_tokens": 0, "logprobs": None, "prompt_logprobs": None},
    **{"detokenize": True, "skip_special_tokens": True, "spaces_between_special_tokens": True},
    **{"logits_processors": None, "include_stop_str_in_output": False, "logit_bias": None},
    **{"truncate_prompt_tokens": None, "output_kind": 0, "output_text_buffer_length": 0},
    **{"guided_decoding": None, "structured_outputs": None, "allowed_token_ids": None},
    **{"extra_args": None, "flat_logprobs": False, "logprob_token_ids": None, "skip_clone": False},
    **{"prompt_logprob_token_ids": None, "prompt_logprob_start": None, "watermarking": None},
    **{"skip_reading_prefix_cache": None, "repetition_detection": None, "stream_interval": None},
    **{"routed_experts_prompt_start": 0, "trace_decode_token_ids": None},
}


def test_all_defaults_of_vllm_at_once_change_nothing() -> None:
    assert SamplingParams.from_mapping(DEFAULTS) == SamplingParams(**DEFAULTS) == SamplingParams()


@pytest.mark.parametrize("name", sorted(DEFAULTS))
def test_null_is_the_default(name: str) -> None:
    values = {name: None}
    expected = SamplingParams(max_tokens=None) if name == "max_tokens" else SamplingParams()
    assert SamplingParams.from_mapping(values) == SamplingParams(**values) == expected


@pytest.mark.parametrize(
    "values",
    [
        {"best_of": "1", "use_beam_search": "False", "length_penalty": "1"},  # as vllm_backend's
        {"length_penalty": 1, "logits_processors": [], "extra_args": {}, "watermarking": False},
        {"detokenize": "true", "beam_width": 1, "spaces_between_special_tokens": False},
        {"guided_decoding_backend": "guidance", "vllm_xargs": {}, "kv_transfer_params": None},
        {"repetition_detection": {"max_pattern_size": 0, "min_pattern_size": 0, "min_count": 0}},
    ],
)
def test_other_spellings_of_neutral_values(values: dict[str, Any]) -> None:
    assert SamplingParams.from_mapping(values) == SamplingParams()


def test_all_n_answers_are_returned() -> None:
    assert SamplingParams(n=3, **{"best_of": 3}) == SamplingParams(n=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"best_of": 2}, "best_of: must be 1 or null, got 2: all n answers are returned"),
        ({"n": 2, "best_of": 1}, "best_of: must be 2 or null, got 1: "),
        ({"best_of": True}, "best_of: must be 1 or null, got True: "),
        ({"use_beam_search": 0}, "use_beam_search: must be true, false or null, got 0"),
        ({"length_penalty": 0.8}, "length_penalty: must be 1.0 or null, got 0.8: it needs a beam"),
        ({"early_stopping": "never"}, "early_stopping: must be false or null, got never: it needs"),
        ({"detokenize": False}, "detokenize: must be true or null, got False: return_output_ids"),
        ({"truncate_prompt_tokens": -1}, "truncate_prompt_tokens: must be null, got -1: "),
        (
            {"spaces_between_special_tokens": False, "skip_special_tokens": False},
            "spaces_between_special_tokens: must be true or null, got False: ",
        ),
        ({"extra_args": {"a": 1}}, "extra_args: must be {} or null, got {'a': 1}: no code of a"),
        ({"guided_decoding_backend": "outlines"}, "guided_decoding_backend: must be auto or guid"),
        ({"self": 1}, "self: is not known"),
    ],
)
def test_a_value_that_would_have_no_effect_is_refused_by_name(
    values: dict[str, Any], message: str
) -> None:
    for make in (SamplingParams.from_mapping, lambda values: SamplingParams(**values)):
        with pytest.raises(InvalidRequest) as caught:
            make(values)
        assert str(caught.value).startswith(message)


def test_a_changed_copy_is_checked_as_well() -> None:
    params = replace(SamplingParams(n=2), structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    assert params == SamplingParams(n=2, **{"guided_regex": "a"})
    with pytest.raises(InvalidRequest, match="^n: must be"):
        replace(params, n=0)


def test_options_of_requests_may_be_null() -> None:
    values = dict.fromkeys(("priority", "tenant", "cache_salt", "timeout_s"))
    assert RequestOptions.take_from({**values, "thinking_token_budget": -1}) == RequestOptions()

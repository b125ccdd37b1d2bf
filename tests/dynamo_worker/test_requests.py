"""Dynamo's requests become ours, and what cannot be honored is refused by its name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paged_backend.checkpoint.bundled import MODEL_DIR
from paged_backend.dynamo.requests import RequestReader, is_slow, read_chunk
from paged_backend.grammar.client import GrammarChecker
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.lora import LoRARequest, numbered
from paged_backend.values.options.limits import LimitOptions
from paged_backend.values.outputs import FinishReason, SequenceOutput, TokenLogprobs
from paged_backend.values.request import RequestLimits
from paged_backend.values.sampling_defaults import SamplingDefaults

LIMITS = RequestLimits.of(LimitOptions(), max_model_len=100, vocab_size=2048, max_num_seqs=8)
ADAPTERS = numbered({"doll": "/adapters/doll", "sheep": "/adapters/sheep"})


@pytest.fixture(scope="module")
def reader() -> RequestReader:
    defaults = SamplingDefaults(temperature=0.5)
    grammars = GrammarChecker(MODEL_DIR, LIMITS.vocab_size)
    return RequestReader(replace(LIMITS, max_loras=2), defaults, grammars, ADAPTERS)


def request_of(**groups: Any) -> dict[str, Any]:
    """A request as Dynamo 1.6 sends it, with nulls for what a client left out."""
    nulls: dict[str, Any] = {
        "sampling_options": dict.fromkeys(
            ("n", "best_of", "temperature", "top_k", "use_beam_search", "seed", "guided_decoding")
        ),
        "stop_conditions": dict.fromkeys(
            ("max_tokens", "stop", "stop_token_ids", "stop_token_ids_hidden", "ignore_eos")
        ),
        "output_options": dict.fromkeys(("logprobs", "prompt_logprobs", "skip_special_tokens")),
    }
    for name, values in groups.items():
        is_group = isinstance(nulls.get(name), dict)
        nulls[name] = nulls[name] | values if is_group else values
    return {"token_ids": [5, 6, 7], "model": "demo", "routing": {"dp_rank": 0}} | nulls


def test_parameters_are_taken_from_all_groups(reader: RequestReader) -> None:
    request = reader.read(
        "r",
        request_of(
            sampling_options={"temperature": 0.7, "seed": 3, "n": 2},
            stop_conditions={
                "max_tokens": 9,
                "stop": ["text that Dynamo looks for"],
                "stop_token_ids": [11],
                "stop_token_ids_hidden": [1, 11],
            },
            output_options={"logprobs": 2},
            extra_args={"nvext": {"cache_salt": "secret"}},
        ),
    )
    params = request.params
    assert (params.temperature, params.seed, params.n, params.max_tokens) == (0.7, 3, 2, 9)
    assert (params.stop, params.stop_token_ids, params.logprobs) == ((), (1, 11), 2)
    assert (request.prompt_token_ids, request.cache_salt) == ([5, 6, 7], "secret")


def test_what_is_left_out_has_the_models_defaults(reader: RequestReader) -> None:
    params = reader.read("r", request_of()).params
    assert (params.temperature, params.max_tokens) == (0.5, 97)


def test_a_name_of_an_adapter_is_that_of_the_options(reader: RequestReader) -> None:
    request = reader.read("r", request_of(routing={"lora_name": "sheep"}))
    assert request.lora == LoRARequest("sheep", 2, "/adapters/sheep")
    assert reader.read("r", request_of(routing={"lora_name": None})).lora is None
    with pytest.raises(InvalidRequest, match=r"^LoRA cow is not supported.*\['doll', 'sheep'\]$"):
        reader.read("r", request_of(routing={"lora_name": "cow"}))
    without = RequestReader(LIMITS, SamplingDefaults(), reader._grammars, {})
    with pytest.raises(InvalidRequest, match=r"^LoRA feature is not enabled.$"):
        without.read("r", request_of(routing={"lora_name": "doll"}))


def test_beams_are_not_sampled(reader: RequestReader) -> None:
    """The model's default of the temperature does not count for them."""
    options = {"use_beam_search": True, "n": 3, "length_penalty": 0.5}
    params = reader.read("r", request_of(sampling_options=options)).params
    assert (params.beam_width, params.n, params.temperature) == (3, 3, 0)
    assert params.length_penalty == 0.5


def test_a_constraint_becomes_a_grammar(reader: RequestReader) -> None:
    guided = {"json": None, "regex": "[0-9]+", "backend": None}
    values = request_of(sampling_options={"guided_decoding": guided})
    request = reader.read("r", values)
    assert is_slow(values) and not is_slow(request_of())
    assert request.grammar and request.params.structured_outputs is None


@pytest.mark.parametrize(
    ("field", "groups"),
    [
        ("temperature", {"sampling_options": {"temperature": -1}}),
        ("temperature", {"sampling_options": {"use_beam_search": True, "n": 2, "temperature": 1}}),
        ("beam_width", {"sampling_options": {"beam_width": 17, "n": 2}}),
        ("length_penalty", {"sampling_options": {"length_penalty": 2.0}}),
        ("max_tokens", {"stop_conditions": {"max_tokens": 101}}),
        ("max_thinking_tokens", {"stop_conditions": {"max_thinking_tokens": 5}}),
        ("prompt_logprobs", {"output_options": {"prompt_logprobs": 1}}),
        ("logprobs", {"output_options": {"logprobs": 21}}),
        ("prompt", {"token_ids": [2048]}),
        ("prompt", {"token_ids": []}),
        ("multi_modal_data", {"multi_modal_data": {"image_url": ["x"]}}),
        ("prefill_result", {"prefill_result": {"disaggregated_params": {}}}),
        ("lora_name", {"routing": {"lora_name": "adapter"}}),
        ("cache_salt", {"extra_args": {"nvext": {"cache_salt": "x" * 257}}}),
        ("guided_decoding", {"sampling_options": {"guided_decoding": {"regex": "a", "json": {}}}}),
    ],
)
def test_what_cannot_be_honored_is_refused(
    reader: RequestReader, field: str, groups: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        reader.read("r", request_of(**groups))
    assert caught.value.field == field


def test_a_chunk_has_dynamos_fields() -> None:
    logprobs = [TokenLogprobs(-0.5, 2, [8, 7], [-0.25, -0.5])]
    output = SequenceOutput("r", 1, [7], FinishReason.ABORT, 3, logprobs)
    assert read_chunk(output, 4, 9) == {
        "token_ids": [7],
        "index": 1,
        "log_probs": [-0.5],
        "top_logprobs": [
            [
                {"rank": 1, "token_id": 8, "token": None, "logprob": -0.25},
                {"rank": 2, "token_id": 7, "token": None, "logprob": -0.5},
            ]
        ],
        "finish_reason": "cancelled",
        "completion_usage": {
            "prompt_tokens": 4,
            "completion_tokens": 9,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    failed = SequenceOutput("r", 0, [], FinishReason.ERROR, problem="no token fits")
    assert read_chunk(failed, 4, 0)["finish_reason"] == "error: no token fits"

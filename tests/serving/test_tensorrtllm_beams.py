"""Beams with tensorrtllm_backend's tensors."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from paged_backend.serving.contract import as_strings
from paged_backend.serving.tensorrtllm.arrays import padded
from paged_backend.serving.tensorrtllm.beams import Beams
from paged_backend.serving.tensorrtllm.completions import MOMENTS, Completions, Wishes
from paged_backend.serving.tensorrtllm.sampling import IDS, TEXT, renamed, sampling_values
from paged_backend.values.config import EngineConfig
from paged_backend.values.errors import InvalidRequest
from paged_backend.values.request import RequestLimits
from paged_backend.values.sampling_params import SamplingParams

LLM = SimpleNamespace(
    tokenizer=SimpleNamespace(eos_token_id=1),
    limits=RequestLimits.of(EngineConfig(), max_model_len=64, vocab_size=2048, max_num_seqs=8),
)
ALL = {"return_log_probs": np.array([True]), "return_perf_metrics": np.array([True])}


def params(**tensors: Any) -> SamplingParams:
    """What a request to ``tensorrt_llm`` with these tensors asks of the engine."""
    arrays = {name: np.array([value]) for name, value in tensors.items()}
    try:
        return SamplingParams.from_mapping(sampling_values(IDS, arrays, LLM))
    except InvalidRequest as error:
        raise renamed(error, IDS, arrays) from error


def answer(counts: list[int], first: int = 0, finished: bool = True) -> dict[str, Any]:
    """A response of the model; token i of a completion has the text of its digit."""
    ids = [first + place for count in counts for place in range(count)]
    rows = np.split(np.array(ids, np.int32), np.cumsum(counts)[:-1])
    times = dict.fromkeys(MOMENTS, 5)
    drafts = {"total_draft_tokens": 4, "total_accepted_draft_tokens": 3}
    return {
        "text_output": as_strings("".join(map(str, row)) for row in rows),
        "num_output_tokens": np.array(counts, np.uint32),
        "num_input_tokens": np.asarray(30, np.uint32),
        "num_cached_tokens": np.array([16], np.uint32),
        "output_ids": np.array(ids, np.int32),
        "logprobs": as_strings(
            json.dumps([{str(i): {"logprob": -float(i)}} for i in row.tolist()]) for row in rows
        ),
        "cumulative_logprob": np.array([-float(sum(range(first + n))) for n in counts], np.float32),
        "metrics": as_strings(json.dumps(times | drafts) for _ in counts),
    }


def test_all_beams_are_in_one_response() -> None:
    beams = Beams(Wishes.of(ALL, is_stream=False), 16)
    ((mine, common),) = beams.split(answer([3, 1, 2]))
    assert mine["text_output"].tolist() == [b"012", b"0", b"01"]
    assert mine["output_ids"].tolist() == [0, 1, 2, 0, 0, 1]
    assert common["sequence_length"].tolist() == [[3, 1, 2]]
    assert common["sequence_index"].tolist() == [[0]]
    assert common["cum_log_probs"].tolist() == [[-3.0, 0.0, -1.0]]
    assert common["output_log_probs"].tolist() == [[[0, -1, -2], [0, 0, 0], [0, -1, 0]]]
    assert common["kv_cache_alloc_total_blocks"].tolist() == [[2]]  # 30 + 2 tokens


def test_each_response_of_a_stream_has_all_tokens_so_far() -> None:
    beams = Beams(Wishes.of(ALL, is_stream=True), 16)
    ((_, common),) = beams.split(answer([1, 1]))
    assert common["output_log_probs"].tolist() == [[[0], [0]]]
    assert list(beams.split(answer([0, 0], first=1))) == []
    ((mine, common),) = beams.split(answer([1, 2], first=1))
    assert mine["text_output"].tolist() == [b"01", b"012"]
    assert mine["output_ids"].tolist() == [0, 1, 0, 1, 2]
    assert common["sequence_length"].tolist() == [[2, 3]]
    assert common["output_log_probs"].tolist() == [[[0, -1, 0], [0, -1, -2]]]
    assert common["cum_log_probs"].tolist() == [[-1.0, -3.0]]


def test_completions_count_their_drafts() -> None:
    completions = Completions(Wishes.of(ALL, is_stream=False), 16)
    for _, common in completions.split(answer([3, 1])):
        assert common["total_draft_tokens"].tolist() == [[4]]
        assert common["total_accepted_draft_tokens"].tolist() == [[3]]
        assert common["acceptance_rate"].tolist() == [[0.75]]


def test_shorter_beams_are_padded() -> None:
    rows = [np.array(row, np.int32) for row in ([5, 6, 7], [5], [])]
    found = padded(rows, 2)
    assert found.tolist() == [[[5, 6, 7], [5, 2, 2], [2, 2, 2]]]
    assert found.dtype == np.int32


def test_the_defaults_are_tensorrtllm_s() -> None:
    found = params(beam_width=4)
    assert (found.beam_width, found.n, found.temperature) == (4, 4, 0)
    assert (found.length_penalty, found.early_stopping) == (0, True)
    given = {"num_return_sequences": 2, "len_penalty": 0.5, "early_stopping": False}
    found = params(beam_width=4, **given)
    assert (found.n, found.length_penalty, found.early_stopping) == (2, 0.5, False)
    texts = {"beam_width": np.array([3]), "length_penalty": np.array([1.5])}
    assert sampling_values(TEXT, texts, LLM)["length_penalty"] == 1.5


def test_what_clients_send_with_every_request_is_taken() -> None:
    usual = {
        **{"temperature": 1.0, "runtime_top_k": 1, "runtime_top_p": 0.0, "seed": 1234},
        **{"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
        **{"min_tokens": 0, "beam_search_diversity_rate": 0.0, "end_id": 1, "pad_id": 1},
    }
    assert params(beam_width=2, **usual) == params(beam_width=2, end_id=1)
    alone = params(beam_width=1, len_penalty=0.0, early_stopping=True, **usual)
    assert alone == params(**usual)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"beam_width": 0}, "beam_width: must be an integer from 1 up to 16"),
        ({"beam_width": 17}, "beam_width: must be an integer from 1 up to 16"),
        ({"num_return_sequences": 3}, "num_return_sequences: must be at most beam_width"),
        ({"temperature": 0.7}, "temperature: must be 1 with beam search"),
        ({"runtime_top_k": 5}, "runtime_top_k: must be 0 with beam search"),
        ({"runtime_top_p": 0.5}, "runtime_top_p: must be 1 with beam search"),
        ({"min_tokens": 3}, "min_tokens: must be 0 with beam search"),
        ({"repetition_penalty": 1.5}, "repetition_penalty: must be 1 with beam search"),
        ({"stop_words": b"end"}, "stop_words: must be left out with beam search"),
        ({"beam_search_diversity_rate": 0.5}, "beam_search_diversity_rate: must be 0"),
        ({"len_penalty": 9.0}, "len_penalty: must be a number from -4"),
        ({"beam_width": 1, "len_penalty": 0.5}, "len_penalty: must be 1 without beam search"),
    ],
)
def test_what_beams_cannot_have_is_refused_by_its_name(
    tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        params(**{"beam_width": 2} | tensors)
    assert message in str(caught.value)

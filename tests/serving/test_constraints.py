"""What an engine hears of a constraint."""

from __future__ import annotations

import json

from paged_backend.config import EngineConfig
from paged_backend.grammar.client import GrammarChecker
from paged_backend.process import wire
from paged_backend.request import RequestLimits
from paged_backend.sampling_params import SamplingParams
from paged_backend.serving.contract import as_strings
from paged_backend.serving.requests.parsing import RequestParser
from paged_backend.text.tokenizer import load_tokenizer


def test_a_constraint_travels_once_as_a_grammar():
    limits = RequestLimits.of(
        EngineConfig.from_mapping({}), max_model_len=64, vocab_size=2048, max_num_seqs=4
    )
    parser = RequestParser(load_tokenizer("demo"), limits, GrammarChecker("demo", 2048))
    fields = {"max_tokens": 5, "structured_outputs": {"regex": "mark[0-9]+"}}
    tensors = {
        "text_input": as_strings(["x"]),
        "sampling_parameters": as_strings([json.dumps(fields)]),
    }
    request = parser.parse("1", tensors, "").request
    assert request.params == SamplingParams(max_tokens=5)
    assert wire.encode(wire.AddRequest(request)).count(b"mark[0-9]+") == 1

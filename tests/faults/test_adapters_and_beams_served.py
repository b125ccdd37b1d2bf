"""A server answers with adapters and beams as an `LLM` does, also when its engine is killed."""

from __future__ import annotations

from pathlib import Path

import pytest
from adapter_folders import make_adapter
from callers import QUESTIONS, Ask, Crowd, ask_all, greedy
from paged_client import Client
from paged_client.errors import InvalidRequest
from servers import LOAD_TIMEOUT_S, MODEL, kill_engine, metrics, serve_demo, wait_for

from paged_backend import LLM, BeamSearchParams, LoRARequest, SamplingParams

pytestmark = pytest.mark.server

NUM_TOKENS = 100


def with_adapter(ask: Ask, name: str) -> Ask:
    return Ask(ask.prompt, {**ask.params, "lora_name": name})


def test_streams_of_adapters_and_beams_survive_their_engine(tmp_path: Path) -> None:
    modules = {name: make_adapter(tmp_path / name, seed) for seed, name in enumerate("ab")}
    options = {"enable_lora": True, "lora_modules": modules}
    bases = [greedy(index, NUM_TOKENS) for index in range(2)]
    beams = [
        Ask(QUESTIONS[2], {"beam_width": 4, "n": 3, "max_tokens": NUM_TOKENS}),
        Ask(QUESTIONS[3], {"beam_width": 2, "max_tokens": NUM_TOKENS, "lora_name": "b"}),
    ]
    asks = [*bases, *(with_adapter(base, name) for base in bases for name in modules), *beams]
    llm = LLM("demo", **options)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    adapters = [LoRARequest(name, 1 + "ab".index(name), modules[name]) for name in "ab"]
    outputs = llm.generate(
        [ask.prompt for ask in asks[:6]], params, lora_request=[None, None, *adapters * 2]
    )
    expected = [[tuple(output.outputs[0].token_ids)] for output in outputs]
    assert len({answer[0] for answer in expected}) == 6  # each adapter changes each answer
    (searched,) = llm.beam_search([QUESTIONS[2]], BeamSearchParams(4, NUM_TOKENS))
    with serve_demo(tmp_path, **options) as server:
        answers = [call.token_ids for call in ask_all(server, asks)]
        assert answers[:6] == expected
        found = [seq.tokens[-len(seq.logprobs) :] for seq in searched.sequences[:3]]
        assert answers[6] == [tuple(token_ids) for token_ids in found]
        with Crowd(server, asks) as crowd:
            wait_for(lambda: crowd.have_tokens(10), LOAD_TIMEOUT_S)
            kill_engine(server)
        assert [call.token_ids for call in crowd.calls] == answers
        wait_for(lambda: metrics(server)["kv_blocks_used"] == 0, LOAD_TIMEOUT_S)
        with Client(server.grpc_url, MODEL) as client:
            with pytest.raises(InvalidRequest, match=r"LoRA c is not supported.*\['a', 'b'\]"):
                client.generate("Hello", lora_name="c")
            with pytest.raises(InvalidRequest, match="beam_width"):
                client.generate("Hello", beam_width=9)

"""Requests that outlive engines: each goes on where the last one was seen."""

from __future__ import annotations

from effort import examples
from engine_without_model import EngineWithoutModel, expected_tokens, make_request
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler_properties import MAX_MODEL_LEN, drafters, requests

from paged_backend.core.seeds import derive_seed


class Caller:
    """Keeps what a front-end keeps: requests and the tokens that it has heard of."""

    def __init__(self):
        self.requests = {}
        self.tokens = {}  # (request_id, index) -> heard so far
        self.ended = set()

    def hear(self, outputs):
        for out in outputs:
            key = (out.request_id, out.index)
            assert key not in self.ended
            self.tokens.setdefault(key, []).extend(out.new_token_ids)
            if out.finish_reason is not None:
                self.ended.add(key)

    def progress(self, request):
        keys = [(request.request_id, index) for index in range(request.params.n)]
        return [None if key in self.ended else self.tokens.get(key, []) for key in keys]

    def open_requests(self):
        return [r for r in self.requests.values() if any(p is not None for p in self.progress(r))]


@settings(max_examples=examples(100), deadline=None)
@given(
    wanted=st.lists(requests, min_size=1, max_size=8),
    lives=st.lists(st.integers(0, 12), max_size=5),  # steps until the engine dies
    num_blocks=st.integers(11, 40),
    async_scheduling=st.booleans(),
    caching=st.booleans(),
    make_drafter=drafters,
)
def test_tokens_do_not_depend_on_how_often_the_engine_dies(
    wanted, lives, num_blocks, async_scheduling, caching, make_drafter
):
    caller = Caller()
    for number, fields in enumerate(wanted):
        request = make_request(f"r{number}", **fields)
        caller.requests[request.request_id] = request
    for num_steps in [*lives, 2000]:
        engine = EngineWithoutModel(
            num_blocks=num_blocks,
            max_num_seqs=4,
            max_num_batched_tokens=16,
            max_model_len=MAX_MODEL_LEN,
            enable_prefix_caching=caching,
            async_scheduling=async_scheduling,
            drafter=make_drafter(),
        )
        for request in caller.open_requests():
            engine.scheduler.add_request(request, 1, caller.progress(request))
        for _ in range(num_steps):
            if not engine.has_unfinished:
                break
            caller.hear(engine.step())
    assert not caller.open_requests()
    for request in caller.requests.values():
        for index in range(request.params.n):
            seed = derive_seed(request.params.seed, index)
            expected = expected_tokens(request, seed, MAX_MODEL_LEN)
            assert caller.tokens[request.request_id, index] == expected


def test_prompt_tokens_of_a_request_that_goes_on_are_counted_once():
    request = make_request("r", range(1, 9), max_tokens=6, ignore_eos=True)
    first = EngineWithoutModel()
    first.add(request)
    outputs = [out for _ in range(3) for out in first.step()]
    heard = [token for out in outputs for token in out.new_token_ids]
    assert len(heard) == 3
    after = EngineWithoutModel()
    after.scheduler.add_request(request, 1, [heard])
    after.run()
    stats = after.scheduler.stats().after(first.scheduler.stats())
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (8, 6)
    assert stats.finished == {"length": 1}


def test_an_answer_that_has_ended_is_not_made_again():
    request = make_request("r", range(1, 9), n=3, max_tokens=6, ignore_eos=True)
    engine = EngineWithoutModel()
    engine.scheduler.add_request(request, 1, [None, [1, 2], [3, 4, 5]])
    engine.run()
    assert set(engine.tokens) == {("r", 1), ("r", 2)}
    assert [len(tokens) for _, tokens in sorted(engine.tokens.items())] == [4, 3]

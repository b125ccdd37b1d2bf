"""The scheduler's policy in short scenarios."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_without_model import EngineWithoutModel, make_request

from paged_backend.core.sequence import PLACEHOLDER


def scheduled(plan):
    return {item.seq_id: (item.start, len(item.token_ids)) for item in plan.scheduled}


def test_decodes_come_first_and_a_prompt_takes_what_they_leave():
    engine = EngineWithoutModel(max_num_batched_tokens=8)
    engine.add(make_request("a", [1, 2, 3], ignore_eos=True))
    engine.step()
    engine.add(make_request("b", range(1, 21), ignore_eos=True))
    engine.step()
    engine.step()
    engine.step()
    assert scheduled(engine.plans[1]) == {0: (3, 1), 1: (0, 7)}
    assert scheduled(engine.plans[2]) == {0: (4, 1), 1: (7, 7)}
    assert scheduled(engine.plans[3]) == {0: (5, 1), 1: (14, 6)}


def test_without_chunks_a_prompt_waits_for_a_whole_budget():
    engine = EngineWithoutModel(
        max_num_batched_tokens=8, max_model_len=8, enable_chunked_prefill=False
    )
    engine.add(make_request("a", [1, 2, 3, 4, 5], max_tokens=2, ignore_eos=True))
    engine.add(make_request("b", [9, 8, 7, 6, 5], max_tokens=2, ignore_eos=True))
    engine.step()
    engine.step()
    assert [list(scheduled(plan)) for plan in engine.plans] == [[0], [0, 1]]


def test_requests_of_one_step_share_the_prefix_that_the_step_computes():
    engine = EngineWithoutModel(max_num_batched_tokens=64)
    for name in "abc":
        engine.add(make_request(name, [*range(1, 13), ord(name) % 50], max_tokens=2))
    engine.step()
    assert [item.start for item in engine.plans[0].scheduled] == [0, 12, 12]
    engine.run()


def test_the_newest_sequence_is_preempted_and_still_completes():
    engine = EngineWithoutModel(num_blocks=7, max_model_len=24, enable_prefix_caching=False)
    for name in "abc":
        engine.add(make_request(name, [ord(name) % 50] * 7, max_tokens=12, ignore_eos=True))
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    assert 2 not in scheduled(engine.plans[-1])
    engine.run()
    assert {len(tokens) for tokens in engine.tokens.values()} == {12}


def test_a_preempted_sequence_returns_before_those_that_wait():
    engine = EngineWithoutModel(
        num_blocks=7, max_num_seqs=2, max_model_len=24, enable_prefix_caching=False
    )
    for name in "abc":
        engine.add(make_request(name, [ord(name) % 50] * 7, max_tokens=12, ignore_eos=True))
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    order = [item.seq_id for plan in engine.plans for item in plan.scheduled]
    preempted = next(i for i in range(len(order)) if order[i : i + 2] == [0, 0])
    assert order.index(1, preempted) < order.index(2)


def test_a_sequence_that_was_planned_already_leaves_the_plan_when_preempted():
    # Answers of "a" begin after "b" was admitted, so they are the last-come while "b" is a prompt.
    engine = EngineWithoutModel(num_blocks=9, max_num_batched_tokens=12, max_model_len=32)
    engine.add(make_request("a", range(1, 9), n=3, max_tokens=8, ignore_eos=True))
    engine.add(make_request("b", range(20, 36), max_tokens=2, ignore_eos=True))
    engine.run()
    assert engine.scheduler.stats().num_preemptions > 0
    assert {len(tokens) for tokens in engine.tokens.values()} == {2, 8}


def test_parallel_samples_compute_the_prompt_once_and_copy_only_a_shared_block():
    engine = EngineWithoutModel()
    engine.add(make_request("a", [1, 2, 3, 4, 5, 6], n=3, max_tokens=4, ignore_eos=True))
    engine.step()
    assert scheduled(engine.plans[0]) == {0: (0, 6)}
    assert engine.scheduler.stats().num_used_blocks == 2
    engine.step()
    assert len(engine.plans[1].block_copies) == 2  # the last owner writes in place
    assert engine.scheduler.stats().num_used_blocks == 4
    engine.run()
    assert len({tuple(tokens) for tokens in engine.tokens.values()}) == 3


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_completions_start_when_there_is_room_and_before_later_requests(async_scheduling):
    requests = [
        make_request("a", [1, 2], max_tokens=3, ignore_eos=True),
        make_request("b", [3, 4], n=3, max_tokens=5, ignore_eos=True, seed=7),
        make_request("c", [5, 6], max_tokens=2, ignore_eos=True),
    ]
    tokens = []
    for max_num_seqs in (3, 8):
        engine = EngineWithoutModel(max_num_seqs=max_num_seqs, async_scheduling=async_scheduling)
        for request in requests:
            engine.add(request)
        engine.run()
        tokens.append(engine.tokens)
        engine.scheduler.check_empty()
        if max_num_seqs == 3:
            starts = dict.fromkeys(seq_id for plan in engine.plans for seq_id in scheduled(plan))
            assert list(scheduled(engine.plans[0])) == [0, 1]
            assert list(starts) == [0, 1, 2, 3, 4]
            assert engine.scheduler.stats().num_prompt_tokens == 6
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) == 5


def test_the_least_recently_used_content_is_evicted_first_from_its_end():
    engine = EngineWithoutModel(num_blocks=9, max_model_len=32)
    engine.add(make_request("old", range(1, 14), max_tokens=1))
    engine.run()
    engine.add(make_request("new", range(30, 47), max_tokens=1))
    engine.run()
    engine.add(make_request("other", [49] * 5, max_tokens=1))  # takes a block nobody can find
    engine.run()
    pool = engine.scheduler.kv.pool
    for name, prompt, hits in (("new", range(30, 47), 16), ("old", range(1, 14), 8)):
        before = engine.scheduler.stats().num_cache_hits
        engine.add(make_request(name + "-again", prompt, max_tokens=1))
        engine.run()
        assert engine.scheduler.stats().num_cache_hits - before == hits
    assert pool.num_free == 8


def test_an_abort_frees_blocks_at_once_in_every_state():
    engine = EngineWithoutModel(max_num_seqs=2, max_num_batched_tokens=8)
    engine.add(make_request("decoding", [1, 2], max_tokens=20, ignore_eos=True))
    engine.step()
    engine.add(make_request("unforked", range(1, 30), n=1, max_tokens=20))
    engine.add(make_request("waiting", [1] * 9, n=2))
    engine.step()
    for name in ("waiting", "unforked", "decoding", "unknown"):
        engine.scheduler.cancel_request(name)
        engine.scheduler.check_invariants()
    assert not engine.scheduler.has_unfinished
    assert engine.scheduler.stats().num_used_blocks == 0
    assert engine.scheduler.stats().finished == {"abort": 4}


def test_a_stopped_answer_counts_as_stop_and_leaves_its_siblings_running():
    engine = EngineWithoutModel()
    engine.add(make_request("r", [1, 2, 3], n=2, max_tokens=20, ignore_eos=True))
    engine.scheduler.stop_completion("r", 1)  # has not begun: nothing to stop
    engine.step()
    engine.scheduler.stop_completion("r", 1)
    engine.scheduler.check_invariants()
    assert [seq.index for seq in engine.scheduler.view().sequences] == [0]
    engine.run()
    assert engine.scheduler.stats().finished == {"stop": 1, "length": 1}
    counts = engine.scheduler.stats().histograms["request_inference_time_seconds"]
    assert counts.cumulative[-1] == 2


def test_the_view_names_every_sequence_and_every_findable_block():
    engine = EngineWithoutModel(max_num_seqs=1)
    engine.add(make_request("done", range(1, 18), max_tokens=1))
    engine.run()
    engine.add(make_request("runs", range(1, 18), max_tokens=9, ignore_eos=True))
    engine.add(make_request("waits", [4] * 5, max_tokens=9))
    engine.step()
    view = engine.scheduler.view()
    runs, waits = view.sequences
    assert (runs.request_id, runs.status, waits.status) == ("runs", "running", "waiting")
    assert (runs.num_prompt_tokens, runs.num_tokens, runs.num_computed_tokens) == (17, 18, 17)
    assert len(runs.block_ids) == -(-17 // view.block_size) and waits.block_ids == []
    assert not set(view.cached_block_ids) & set(runs.block_ids)
    engine.run()
    stats = engine.scheduler.stats()
    assert len(engine.scheduler.view().cached_block_ids) == stats.num_cached_blocks > 0


def test_stop_tokens_count_only_after_min_tokens():
    engine = EngineWithoutModel()
    free = make_request("free", [5, 6, 7], max_tokens=12, ignore_eos=True)
    engine.add(free)
    engine.run()
    third = engine.tokens["free", 0][2]
    first = engine.tokens["free", 0].index(third)
    engine.add(
        make_request("stop", [5, 6, 7], max_tokens=12, stop_token_ids=[third], ignore_eos=True)
    )
    engine.run()
    assert len(engine.tokens["stop", 0]) == first + 1
    assert engine.reasons["stop", 0] == "stop"


def test_a_request_id_in_use_is_refused():
    engine = EngineWithoutModel()
    engine.add(make_request("a", [1]))
    with pytest.raises(ValueError, match="already in use"):
        engine.add(make_request("a", [1]))


def test_a_block_that_decoding_fills_is_found_as_soon_as_its_tokens_are_known():
    """Whether or not the next step was planned before they were."""
    for async_scheduling in (False, True):
        engine = EngineWithoutModel(max_num_seqs=1, async_scheduling=async_scheduling)
        engine.add(make_request("a", [1, 2, 3], max_tokens=9, ignore_eos=True))
        while len(engine.tokens.get(("a", 0), [])) < 6:
            engine.step()
        known = [1, 2, 3, *engine.tokens["a", 0]]
        later = make_request("b", [*known, 7])
        engine.add(later)
        waiting = engine.scheduler.sequences.waiting.first()
        assert len(engine.scheduler.kv.find_prefix(waiting)) == len(known) // 4


def test_the_next_step_is_planned_before_the_last_is_known_but_none_beyond_the_limit():
    engine = EngineWithoutModel(async_scheduling=True)
    engine.add(make_request("a", [1, 2], max_tokens=3, ignore_eos=True))
    outputs = [engine.step() for _ in range(4)]
    assert [len(out) for out in outputs] == [0, 1, 1, 1]
    assert [item.token_ids for plan in engine.plans for item in plan.scheduled] == [
        [1, 2],
        [PLACEHOLDER],
        [PLACEHOLDER],
    ]
    assert not engine.has_unfinished


def test_lower_priorities_come_first_and_equal_ones_in_turn():
    engine = EngineWithoutModel(max_num_seqs=1)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", -1)):
        engine.add(make_request(name, [1, 2], max_tokens=2, priority=priority, ignore_eos=True))
    engine.run()
    firsts = [name for name, _ in engine.tokens]
    assert firsts == ["d", "a", "c", "b"]


def test_the_sequence_of_the_lowest_priority_is_preempted():
    """The one that came last, unless another has a higher number."""
    for priority, preempted in ((0, "c"), (5, "b")):
        engine = EngineWithoutModel(num_blocks=7, max_model_len=24, enable_prefix_caching=False)
        for name in "abc":
            fields = {"max_tokens": 9, "ignore_eos": True}
            fields["priority"] = priority if name == "b" else 0
            engine.add(make_request(name, [1, 2, 3, 4, 5], **fields))
        engine.run()
        released = [seq_id for plan in engine.plans for seq_id in plan.freed_seq_ids]
        assert "abc"[released[0]] == preempted
        assert engine.scheduler.stats().num_preemptions > 0


def test_a_sequence_that_gives_up_its_blocks_is_sent_as_freed_once():
    engine = EngineWithoutModel(num_blocks=7, max_model_len=24, enable_prefix_caching=False)
    for name in "abc":
        engine.add(make_request(name, [ord(name) % 50, 2, 3, 4, 5], max_tokens=9, ignore_eos=True))
    engine.run()
    engine.add(make_request("d", [1], max_tokens=1))
    engine.run()
    released = [seq_id for plan in engine.plans for seq_id in plan.freed_seq_ids]
    assert engine.scheduler.stats().num_preemptions > 0
    assert len(released) == 3 + engine.scheduler.stats().num_preemptions


def test_check_empty_raises_if_blocks_are_held_after_all_requests():
    engine = EngineWithoutModel()
    engine.add(make_request("r", [1, 2, 3], max_tokens=2))
    engine.run()
    engine.scheduler.check_empty()
    engine.scheduler.kv.pool.allocate()
    with pytest.raises(RuntimeError, match="still {'blocks': 1,"):
        engine.scheduler.check_empty()


def test_the_cached_prefix_of_the_queues_head_is_looked_up_once_in_a_step(monkeypatch):
    engine = EngineWithoutModel(num_blocks=12, max_num_seqs=8)
    for tenant in "ab":  # both hold as much, so neither is preempted for the other
        engine.add(make_request(tenant, [1] * 4, max_tokens=12, ignore_eos=True, tenant=tenant))
    engine.step()
    for tenant in "ab":
        engine.add(make_request(f"{tenant}2", [9] * 30, max_tokens=4, tenant=tenant))
    looked_up = []
    find_prefix = engine.scheduler.kv.find_prefix
    monkeypatch.setattr(
        engine.scheduler.kv, "find_prefix", lambda seq: looked_up.append(seq) or find_prefix(seq)
    )
    for _ in range(6):
        looked_up.clear()
        engine.step()
        assert len(looked_up) == 1
    assert engine.scheduler.stats().num_waiting == 2


def test_a_request_of_many_completions_leaves_the_places_of_others_alone():
    """While its prompt is computed, others start; nobody is preempted in vain."""
    engine = EngineWithoutModel(
        max_num_seqs=16, max_num_batched_tokens=32, max_model_len=256, num_blocks=400
    )
    for number in range(10):
        engine.add(
            make_request(f"a{number}", [number + 1] * 3, max_tokens=60, ignore_eos=True, tenant="a")
        )
    engine.step()
    engine.add(make_request("c", [5] * 200, n=16, max_tokens=5, ignore_eos=True, tenant="c"))
    engine.step()
    engine.add(make_request("b", [7, 8], max_tokens=2, ignore_eos=True, tenant="b"))
    for _ in range(4):
        engine.step()
    assert engine.tokens["b", 0]
    assert engine.scheduler.stats().num_preemptions == 0
    engine.run()
    engine.scheduler.check_empty()


def test_completions_without_room_do_not_count_as_waiting_requests():
    """Their request was accepted before, and they must not cause the refusal of new requests."""
    engine = EngineWithoutModel(max_num_seqs=4, max_num_batched_tokens=64)
    engine.add(make_request("a", range(1, 30), n=2, max_tokens=9, ignore_eos=True))
    engine.add(make_request("b", range(1, 20), n=4, max_tokens=9, ignore_eos=True))
    assert engine.scheduler.queue_state() == (2, 48, 4)
    engine.step()
    assert engine.scheduler.stats().num_waiting == 2
    assert engine.scheduler.queue_state() == (0, 0, 0)
    engine.run()
    assert len(engine.tokens) == 6


def test_prompts_that_are_computed_again_are_charged_again():
    """Without a prefix cache, completions that start later cost their tenant their prompt."""
    engine = EngineWithoutModel(
        max_num_seqs=1, max_num_batched_tokens=64, enable_prefix_caching=False
    )
    engine.add(make_request("a", range(1, 30), n=4, max_tokens=1, ignore_eos=True, tenant="a"))
    for number in range(4):
        prompt = range(number + 2, number + 31)
        engine.add(make_request(f"b{number}", prompt, max_tokens=1, ignore_eos=True, tenant="b"))
    engine.run()
    order = [request_id[0] for request_id, _ in engine.tokens]
    assert order == list("abababab")


def with_threshold(threshold, *args, **options):
    return replace(make_request(*args, **options), cache_hit_threshold=threshold)


def test_a_request_with_too_little_of_its_prompt_cached_ends_on_arrival():
    engine = EngineWithoutModel(max_num_batched_tokens=64)
    engine.add(make_request("first", range(1, 13), max_tokens=2))
    engine.run()
    # 12 of 16 tokens are cached.
    engine.add(with_threshold(0.75, "enough", range(1, 17), max_tokens=2))
    engine.add(with_threshold(0.76, "missed", range(1, 17), max_tokens=2, n=2))
    engine.add(with_threshold(0.01, "salted", range(1, 17), max_tokens=2, salt="a"))
    assert [engine.scheduler.is_open(name) for name in ("missed", "unknown")] == [True, False]
    early = [out for out in engine.step() if out.request_id != "enough"]
    assert [(out.request_id, out.index, out.num_cached_tokens) for out in early] == [
        ("missed", 0, 12),
        ("missed", 1, 12),
        ("salted", 0, 0),
    ]
    assert {out.finish_reason for out in early} == {"cache_threshold"}
    engine.run()
    assert engine.reasons["enough", 0] == "length"
    assert engine.scheduler.stats().finished["cache_threshold"] == 3
    engine.scheduler.check_empty()


def test_a_request_that_ends_on_arrival_can_be_cancelled_before_it_is_told():
    engine = EngineWithoutModel()
    engine.add(with_threshold(1, "a", [1, 2, 3]))
    engine.add(with_threshold(1, "b", [1, 2, 3]))
    (output,) = engine.scheduler.cancel_request("a")
    assert output.finish_reason == "cache_threshold"
    assert [out.request_id for out in engine.step()] == ["b"]
    assert not engine.has_unfinished


def test_a_request_of_an_earlier_engine_continues_whatever_is_cached():
    engine = EngineWithoutModel()
    engine.scheduler.add_request(with_threshold(1, "a", [1, 2, 3], max_tokens=2), 1, [[]])
    engine.run()
    assert engine.reasons["a", 0] == "length"

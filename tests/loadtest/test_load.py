"""When requests are sent: rates, slots, traces and conversations."""

from __future__ import annotations

import asyncio
import statistics
from time import perf_counter

import pytest
from paged_loadtest.endpoints import open_endpoint
from paged_loadtest.load import Driver, arrival_times
from paged_loadtest.options import LoadOptions, TargetOptions

from paged_backend.tools.workloads.request import Turn, WorkloadRequest
from paged_backend.values.errors import ConfigError


def requests(count, **more):
    return [WorkloadRequest((1, 2, 3), 4, **more) for _ in range(count)]


def gaps(times):
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


def test_a_rate_is_kept_exactly_and_its_gaps_are_poissons():
    times = arrival_times(requests(4000), LoadOptions(request_rate="50"), seed=1)
    assert times == sorted(times) and times[0] > 0
    assert times[-1] == pytest.approx(80)
    spread = statistics.pstdev(gaps(times)) / statistics.fmean(gaps(times))
    assert spread == pytest.approx(1, abs=0.1)  # spread of an exponential distribution


@pytest.mark.parametrize(("burstiness", "spread"), [(0.25, 2.0), (4.0, 0.5), (1e6, 0.001)])
def test_burstiness_is_the_shape_of_a_gamma_distribution(burstiness, spread):
    load = LoadOptions(request_rate="10", burstiness=burstiness)
    drawn = gaps(arrival_times(requests(8000), load, seed=2))
    measured = statistics.pstdev(drawn) / statistics.fmean(drawn)
    assert measured == pytest.approx(spread, rel=0.1)


def test_arrivals_are_the_seeds():
    load = LoadOptions(request_rate="10")
    assert arrival_times(requests(9), load, 3) == arrival_times(requests(9), load, 3)
    assert arrival_times(requests(9), load, 3) != arrival_times(requests(9), load, 4)


def test_without_a_rate_all_are_due_at_once():
    assert arrival_times(requests(3), LoadOptions(), 0) == [0.0] * 3


def test_a_trace_has_its_own_times():
    trace = [WorkloadRequest((1,), 1, arrival_s=at) for at in (0.0, 0.5, 0.75)]
    assert arrival_times(trace, LoadOptions(request_rate="100"), 0) == [0.0, 0.5, 0.75]


@pytest.mark.parametrize("rate", ["0", "-1", "fast", "nan", ""])
def test_rates_that_are_none(rate):
    with pytest.raises(ConfigError, match="request_rate must be a number above 0 or inf"):
        LoadOptions(request_rate=rate)


def drive(targets, sent, times, max_concurrency=None):
    """The driver after its run."""

    async def run():
        options = TargetOptions(base_url=targets.server.running.grpc_url)
        async with open_endpoint(options) as endpoint:
            await endpoint.check()
            driver = Driver(endpoint, max_concurrency)
            await driver.run(sent, times)
            return driver

    return asyncio.run(run())


def most_open(timelines):
    """The highest number of requests between their sending and their last token."""
    edges = [(t.sent_s, 1) for t in timelines] + [(t.arrivals_s[-1], -1) for t in timelines]
    count = most = 0
    for _, change in sorted(edges):
        count += change
        most = max(most, count)
    return most


@pytest.mark.server
def test_slots_are_all_used_and_no_more(targets):
    sent = [WorkloadRequest((7, number), 24) for number in range(20)]
    driver = drive(targets, sent, [0.0] * 20, max_concurrency=5)
    assert [t.num_output_tokens for t in driver.timelines] == [24] * 20
    assert most_open(driver.timelines) == 5


@pytest.mark.server
def test_an_open_loop_sends_on_time_whatever_is_unanswered(targets):
    sent = [WorkloadRequest((9, number), 300) for number in range(6)]
    times = [0.05 * number for number in range(6)]
    began = perf_counter()
    driver = drive(targets, sent, times)
    sent_at = sorted(t.sent_s - began for t in driver.timelines)
    assert all(at >= due for at, due in zip(sent_at, times, strict=True))
    # On time: before anybody has an answer, which takes many times as long as all of the sending.
    assert most_open(driver.timelines) == 6
    assert driver.elapsed_s >= max(t.arrivals_s[-1] - t.sent_s for t in driver.timelines)


@pytest.mark.server
def test_a_conversation_goes_on_in_its_slot_with_what_was_answered(targets, client):
    turns = ("What does len do?", "What does abs do?", "What does min do?")
    first, *later = turns
    chat = WorkloadRequest(
        ({"role": "user", "content": first},),
        8,
        later=tuple(Turn(content, 8) for content in later),
    )
    driver = drive(targets, [chat, chat], [0.0, 0.0], max_concurrency=1)
    assert len(driver.timelines) == 6 and most_open(driver.timelines) == 1
    history = []
    for turn, timeline in zip(turns, driver.timelines[:3], strict=True):
        history.append({"role": "user", "content": turn})
        expected = client.generate(history, temperature=0, max_tokens=8, ignore_eos=True)
        assert timeline.text == expected.text
        assert timeline.num_input_tokens == expected.num_input_tokens
        history.append({"role": "assistant", "content": timeline.text})


@pytest.mark.server
def test_a_failed_request_ends_its_conversation_only(targets):
    bad = WorkloadRequest(({"role": "user", "content": "Hi"},), 10**6, later=(Turn("and?", 4),))
    driver = drive(targets, [bad, *requests(3)], [0.0] * 4, max_concurrency=2)
    assert sorted(t.is_success for t in driver.timelines) == [False, True, True, True]

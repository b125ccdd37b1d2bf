"""Lanes are fair among tenants, whatever one of them asks for."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from paged_backend.serving.contract import as_strings
from paged_backend.serving.requests import lane as lanes
from paged_backend.serving.requests.lane import Lane
from paged_backend.serving.requests.parameters import tenant_of
from paged_backend.serving.requests.preparation import (
    CHARACTERS_PER_TOKEN,
    Load,
    Preparation,
)
from paged_backend.values.errors import RequestRefused


class Log:
    """Jobs that sleep, and what ran when."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.most_at_once: Counter[str] = Counter()
        self._running: Counter[str] = Counter()
        self._lock = threading.Lock()

    def job(self, name: str, seconds: float, tenant: str = "") -> Callable[[], None]:
        def run() -> None:
            with self._lock:
                self.started.append(name)
                self._running[tenant] += 1
                self.most_at_once[tenant] = max(self.most_at_once[tenant], self._running[tenant])
            time.sleep(seconds)
            with self._lock:
                self._running[tenant] -= 1

        return run


@pytest.fixture
def log() -> Log:
    return Log()


@pytest.fixture
def lane() -> Iterator[Lane]:
    made = Lane("test")
    yield made
    made.close()


def test_a_tenant_has_one_thread_and_the_others_go_on_beside_it(lane: Lane, log: Log) -> None:
    for number in range(20):
        lane.put(log.job(f"a{number}", 0.02, "a"), 1, "a")
    lane.put(log.job("b", 0.0, "b"), 1, "b")
    lane.close()
    assert log.started.index("b") <= 2
    assert log.started.index("a0") < log.started.index("a19")
    assert log.most_at_once["a"] == 1


def test_tenants_get_equal_time_however_long_their_jobs_are(lane: Lane, log: Log) -> None:
    blocked = threading.Event()
    for tenant in ("x", "y"):  # until all jobs are there
        lane.put(lambda: assert_(blocked.wait(30)), 1, tenant)
    for number in range(40):
        lane.put(log.job("short", 0.01), 1, "short")
        if number < 10:
            lane.put(log.job("long", 0.04), 1, "long")
            lane.put(log.job("other", 0.04), 1, "other")
    blocked.set()
    lane.close()
    first = Counter(log.started[:30])
    assert first["short"] >= 2 * first["long"]
    assert abs(first["long"] - first["other"]) <= 2


def assert_(condition: bool) -> None:
    assert condition


def test_slow_tenants_leave_a_thread_to_the_others(
    lane: Lane, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "SLOW_S", 0.05)
    for number in range(4):
        for tenant in ("a", "b", "c"):
            lane.put(log.job(f"{tenant}{number}", 0.2, tenant), 1, tenant)
    time.sleep(0.7)  # each of them has had a job by then
    waited = []
    for _ in range(8):
        asked = time.monotonic()
        done = threading.Event()
        lane.put(done.set, 1, "quick")
        assert done.wait(10)
        waited.append(time.monotonic() - asked)
        time.sleep(0.05)
    assert statistics.median(waited) < 0.03


def test_an_account_is_kept_for_no_longer_than_it_matters(lane: Lane, log: Log) -> None:
    for number in range(50):
        lane.put(log.job("x", 0.0), 7, f"tenant{number}")
    lane.close()
    assert lane.share_of("tenant1") == (0, 0) and not lane._accounts
    assert (lane.num_jobs, lane.size) == (0, 0)


def test_a_tenant_fills_a_part_of_the_room_for_text() -> None:
    preparation = Preparation(max_waiting_tokens=90_000 // CHARACTERS_PER_TOKEN)
    over = threading.Event()
    load = Load(10_000, needs_template=False)
    try:
        for number in range(8):
            preparation.run(load, lambda: assert_(over.wait(30)), "a")
            assert preparation.num_waiting_of("a") == number + 1
        with pytest.raises(RequestRefused, match="80000 characters of this tenant wait to be"):
            preparation.run(load, lambda: None, "a")
        preparation.run(load, lambda: assert_(over.wait(30)), "b")
        with pytest.raises(RequestRefused, match="90000 characters wait to be tokenized already"):
            preparation.run(load, lambda: None, "c")
    finally:
        over.set()
        preparation.close()


@pytest.mark.parametrize(
    ("sampling", "parameters", "tenant"),
    [
        (None, "", ""),
        (None, '{"tenant": "a", "n": [1, {"tenant": "b"}]}', "a"),
        ('{"n": 1}', '{"tenant": "a"}', ""),
        ('{"x": {"tenant": "b"}, "tenant": "a"}', "", "a"),
        (r'{"stop": "\"tenant\": \"b\"", "tenant": "a\u00e9"}', "", "aé"),
        (r'{"ten\u0061nt": "a"}', "", "a"),
        ('{"tenant": 3}', "", ""),
        ('{"tenant": "a"', "", ""),
        ('{"tenant": "a", "x":' + "[" * 10**5, "", ""),
        ('["tenant"]', "", ""),
    ],
)
def test_the_tenant_of_a_request(sampling: str | None, parameters: str, tenant: str) -> None:
    tensors: dict[str, Any] = {}
    if sampling is not None:
        tensors["sampling_parameters"] = as_strings([sampling])
    assert tenant_of(tensors, parameters) == tenant


@pytest.mark.parametrize(
    ("parameters", "needs_grammar"),
    [
        ('{"stop": "a"}', False),
        (r'{"stop": "\u3002\n"}', False),
        ('{"structured_outputs": {"regex": "a"}}', True),
        (r'{"structured\u005foutputs": {"regex": "a"}}', True),
        (r'{"\u0067uided_regex": "a"}', True),
        (r'{"stop": "\ud800"}', True),  # cannot be read here
        (r'{"stop": ["\u3002"' + ', "a"' * 2000 + "]}", True),  # is not read here
    ],
)
@pytest.mark.parametrize("as_tensor", [None, str, str.encode])
def test_a_constraint_is_found_however_its_name_is_written(
    parameters: str, needs_grammar: bool, as_tensor: Callable[[str], Any] | None
) -> None:
    tensors: dict[str, Any] = {}
    if as_tensor is not None:
        tensors["sampling_parameters"] = np.array([as_tensor(parameters)], object)
        parameters = ""
    assert Load.of(tensors, parameters).needs_grammar == needs_grammar


def test_parameters_that_are_too_long_are_not_looked_at() -> None:
    tensors = {"sampling_parameters": np.array([b"x" * 2**26], object)}
    started = time.thread_time()
    assert not Load.of(tensors, "").is_small
    assert time.thread_time() - started < 0.01


def test_finding_the_tenant_of_a_long_request_takes_milliseconds() -> None:
    text = json.dumps({"structured_outputs": {"json": {"a": ["x"] * 200_000}}, "tenant": "a"})
    tensors = {"sampling_parameters": as_strings([text])}
    started = time.thread_time()
    assert tenant_of(tensors, "") == "a"
    assert time.thread_time() - started < 0.05

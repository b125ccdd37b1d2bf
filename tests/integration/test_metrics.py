"""Every metric of the model at the server's endpoint, moved by a known workload."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest
from paged_client import Client
from servers import stop_between_responses

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server

pytestmark = pytest.mark.server

MODEL = "paged_llm"
NUM_BLOCKS = 100
BLOCK_BYTES = 98304  # 16 tokens of the demo model
OPTIONS = {
    "model": "demo",
    "max_num_seqs": 4,
    "max_model_len": 512,
    "kv_cache_memory_bytes": (NUM_BLOCKS + 1) * BLOCK_BYTES,
    "enable_inspect": True,
}
PER_CALL = (
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
)
CALLS_ENDED = "e2e_request_latency_seconds_count"
PER_ANSWER = (
    "request_time_per_output_token_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
)
_SAMPLE = re.compile(r"^((?:paged_|vllm:|nv_trt_llm_)\w+)\{([^}]*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
Page = dict[str, float]
"""Name and labels but model and version, as Prometheus writes them -> value."""


def read(server: RunningServer) -> Page:
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        text = response.read().decode()
    page: Page = {}
    for name, labels, value in _SAMPLE.findall(text):
        pairs = dict(_LABEL.findall(labels))
        assert (pairs.pop("model"), pairs.pop("version")) == (MODEL, "1")
        shown = ",".join(f'{label}="{text}"' for label, text in pairs.items())
        page[name + (f"{{{shown}}}" if shown else "")] = float(value)
    return page


def settled(server: RunningServer, before: Page | None = None, num_calls: int = 0) -> Page:
    """The metrics once nothing is open and the last counts are published.

    These are the counts of the requests since ``before`` was read: a front-end that has nothing to
    do publishes them twice a second, on a busy machine later.
    """
    counted = f"paged_{CALLS_ENDED}"
    earlier = before[counted] if before is not None else 0
    deadline = time.monotonic() + 60
    previous: Page = {}
    while time.monotonic() < deadline:
        page = read(server)
        told = page["paged_kv_blocks_total"] > 0  # a front-end says nothing in its first second
        complete = before is None or page[counted] == earlier + num_calls
        if told and complete and page == previous and page["paged_num_requests_running"] == 0:
            return page
        previous = page
        time.sleep(0.7)  # longer than a front-end waits for anything to do
    raise AssertionError(f"the metrics go on changing, or {counted} is {page[counted] - earlier}")


class Growth:
    """What metrics gained since an earlier page."""

    def __init__(self, before: Page, after: Page) -> None:
        self._before = before
        self._after = after

    def __call__(self, name: str) -> float:
        key = f"paged_{name}"
        return self._after[key] - self._before[key]

    def histogram(self, name: str, values: list[float]) -> None:
        """Exactly these values were observed."""
        prefix = f"paged_{name}_bucket{{"
        bounds = {k: float(k[len(prefix) + 4 : -2]) for k in self._after if k.startswith(prefix)}
        assert len(bounds) > 4
        for key, bound in bounds.items():
            expected = sum(value <= bound for value in values)
            assert self._after[key] - self._before[key] == expected, key
        assert self(f"{name}_sum") == sum(values)
        assert self(f"{name}_count") == len(values)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository: Path = tmp_path_factory.mktemp("metrics")
    write_model_repository(repository, MODEL, OPTIONS, instances=2)
    with start_server(repository) as running:
        yield running


@pytest.fixture
def client(small: RunningServer) -> Iterator[Client]:
    with Client(small.grpc_url, MODEL, timeout=60) as client:
        yield client


def exactly(num_tokens: int) -> dict[str, object]:
    return {"temperature": 0, "max_tokens": num_tokens, "ignore_eos": True}


def test_all_families_are_there_before_any_call(small):
    page = settled(small)
    for name in (*PER_CALL, *PER_ANSWER, "inter_token_latency_seconds", "engine_step_seconds"):
        assert page[f"paged_{name}_count"] == 0
        assert page[f'paged_{name}_bucket{{le="+Inf"}}'] == 0
    assert page["paged_engine_up"] == 1
    assert page["paged_kv_blocks_total"] == page["paged_kv_blocks_free"] == NUM_BLOCKS
    assert page["paged_kv_bytes_per_token"] * 16 == BLOCK_BYTES
    facts = f'block_size="16",num_gpu_blocks="{NUM_BLOCKS}"'
    assert page[f"paged_cache_config_info{{{facts}}}"] == 1


def test_counts_and_sizes_are_exact(small, client):
    before = settled(small)
    prompt = list(range(100, 200))
    client.generate(prompt, **exactly(20))
    client.generate(prompt, **exactly(30))  # 96 of its 100 tokens are cached by now
    client.generate([7] * 10, n=3, **exactly(5))
    after = settled(small, before, 3)
    grew = Growth(before, after)
    assert grew("prompt_tokens_total") == grew("prefix_cache_queries_total") == 210
    assert grew("prefix_cache_hits_total") == 96
    assert after["paged_prefix_cache_hit_rate"] == pytest.approx(
        after["paged_prefix_cache_hits_total"] / after["paged_prompt_tokens_total"]
    )
    assert grew("generation_tokens_total") == 20 + 30 + 3 * 5
    assert grew('request_success_total{finished_reason="length"}') == 5
    assert grew('request_success_total{finished_reason="stop"}') == 0
    assert grew('request_success_total{finished_reason="abort"}') == 0
    assert grew("num_preemptions_total") == 0
    grew.histogram("request_prompt_tokens", [100, 100, 10])
    grew.histogram("request_generation_tokens", [20, 30, 15])
    grew.histogram("request_max_num_generation_tokens", [20, 30, 5])
    grew.histogram("request_params_n", [1, 1, 3])
    grew.histogram("request_params_max_tokens", [20, 30, 5])
    # One step for each prompt, whose last token gives the first of the answer; then one a token.
    steps = [100] + [1] * 19 + [4] + [1] * 29 + [10] + [3] * 4
    grew.histogram("iteration_tokens_total", steps)
    grew.histogram("engine_step_sequences", [1] * 51 + [3] * 4)
    assert grew("engine_steps_total") == grew("engine_step_seconds_count") == 55
    for name in PER_CALL:
        assert grew(f"{name}_count") == 3
    for name in PER_ANSWER:
        assert grew(f"{name}_count") == 5
    assert grew("inter_token_latency_seconds_count") == 19 + 29 + 3 * 4


def test_forced_tokens_are_those_of_constrained_answers(small, client):
    before = settled(small)
    client.generate([12] * 30, **exactly(25))
    after = settled(small, before, 1)
    assert Growth(before, after)("forced_tokens_total") == 0
    schema = {"type": "object", "properties": {"a_long_name": {"type": "boolean"}}}
    schema |= {"required": ["a_long_name"], "additionalProperties": False}
    constraint = {"json": schema, "disable_any_whitespace": True}
    answer = client.generate("Is it?", max_tokens=60, structured_outputs=constraint)
    assert answer.finish_reason == "stop"
    grew = Growth(after, settled(small, after, 1))
    # Only the value is sampled. Each step, the first included, samples one token.
    assert grew("forced_tokens_total") == grew("generation_tokens_total") - grew(
        "engine_steps_total"
    )
    assert grew("forced_tokens_total") > len(answer.token_ids) / 2


def test_tokens_that_arrive_together_count_one_by_one(small, client):
    """A front end that stood still finds a whole answer at once.

    It has passed on all requests before, because the server gives up a front end that accepts no
    request for a second.
    """
    before = settled(small)
    stubs = [p for p in psutil.Process(small.pid).children() if "stub" in p.name()]
    with ThreadPoolExecutor(8) as pool:
        calls = [pool.submit(client.generate, [30 + i] * 9, **exactly(250)) for i in range(8)]
        while num_open(small) < 8:  # four of them run
            assert not any(call.done() for call in calls)
        for stub in stubs:
            stop_between_responses(stub)
        time.sleep(1)
        for stub in stubs:
            stub.resume()
        assert [len(call.result().token_ids) for call in calls] == [250] * 8
    grew = Growth(before, settled(small, before, 8))
    assert grew("inter_token_latency_seconds_count") == 8 * 249
    assert grew("time_to_first_token_seconds_count") == 8


def num_open(server):
    page = read(server)
    return page["paged_num_requests_running"] + page["paged_num_requests_waiting"]


def test_times_add_up(small, client):
    before = settled(small)
    completion = client.generate([11] * 40, **exactly(50))
    grew = Growth(before, settled(small, before, 1))
    whole, first = grew("e2e_request_latency_seconds_sum"), grew("time_to_first_token_seconds_sum")
    gaps = grew("inter_token_latency_seconds_sum")
    # Two readings of the clock, between which the machine may have done something else.
    assert first + gaps <= whole == pytest.approx(first + gaps, abs=0.1)
    assert grew("request_time_per_output_token_seconds_sum") == pytest.approx(gaps / 49)
    engine = grew("request_inference_time_seconds_sum")
    prefill, decode = (grew(f"request_{part}_time_seconds_sum") for part in ("prefill", "decode"))
    assert engine == pytest.approx(prefill + decode)
    queue = grew("request_queue_time_seconds_sum")
    assert 0 < queue + prefill < first and queue + engine < whole < completion.latency_s
    # What is not within a step is the loop around it, and what else the machine has to do.
    assert engine * 0.05 < grew("engine_step_seconds_sum") < whole


def test_a_stop_string_counts_as_stop_and_a_cancelled_call_as_abort(small, client):
    before = settled(small)
    question = "What does os.getcwd do?"
    text = client.generate(question, temperature=0, max_tokens=60).text
    answer = client.generate(question, temperature=0, max_tokens=60, stop=[text[4:8]])
    assert answer.finish_reason == "stop" and text.startswith(answer.text)
    stream = client.stream([3] * 20, **exactly(480))
    next(stream)
    stream.cancel()
    grew = Growth(before, settled(small, before, 2))
    assert grew('request_success_total{finished_reason="stop"}') == 2
    assert grew('request_success_total{finished_reason="abort"}') == 1
    assert grew('request_success_total{finished_reason="length"}') == 0
    for name in PER_ANSWER:
        assert grew(f"{name}_count") == 2


def test_gauges_under_load(small, client):
    """All of one moment agree; a page that was read while they were set is read again."""
    with ExitStack() as stack:
        for number in range(12):
            stack.enter_context(client.stream([20 + number] * 64, **exactly(300)))
        deadline = time.monotonic() + 60
        while wrong := disagreements(read(small)):
            assert time.monotonic() < deadline, wrong
    after = settled(small)
    assert after["paged_kv_blocks_used"] == after["paged_num_requests_waiting"] == 0
    assert after["paged_kv_blocks_cached"] > 0


def disagreements(page: Page) -> dict[str, tuple[float, float]]:
    """What gauges show in place of what they should while twelve requests have four seats."""
    requests = 'nv_trt_llm_request_metrics{request_type="%s"}'
    blocks = 'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="%s"}'
    used = page["paged_kv_blocks_used"]
    expected = {
        "paged_num_requests_running": 4,
        "paged_num_requests_waiting": 8,
        "paged_kv_blocks_used": min(max(used, 4 * 4), 4 * 23),
        "paged_kv_blocks_free": NUM_BLOCKS - used,
        "paged_kv_cache_usage_perc": pytest.approx(used / NUM_BLOCKS),
        "paged_kv_cache_utilization_perc": pytest.approx(0.75, abs=0.25),
        requests % "max": 4,
        requests % "active": 12,
        requests % "scheduled": 4,
        requests % "waiting": 8,
        blocks % "max": NUM_BLOCKS,
        blocks % "tokens_per": 16,
        blocks % "used": used,
        blocks % "free": NUM_BLOCKS - used,
    }
    return {name: (page[name], value) for name, value in expected.items() if page[name] != value}


def test_preemption_is_counted_and_counts_no_token_twice(small, client):
    before = settled(small)
    with ExitStack() as stack:  # 4 x 30 blocks in a pool of 100
        streams = [
            stack.enter_context(client.stream([60 + i] * 40, **exactly(440))) for i in range(4)
        ]
        assert [sum(chunk.num_output_tokens for chunk in stream) for stream in streams] == [440] * 4
    grew = Growth(before, settled(small, before, 4))
    assert grew("num_preemptions_total") > 0
    assert grew("generation_tokens_total") == 4 * 440
    assert grew("prompt_tokens_total") == 4 * 40
    grew.histogram("request_generation_tokens", [440] * 4)
    assert grew("iteration_tokens_total_sum") > 4 * (40 + 439)  # something was computed twice


def test_inspect_shows_shared_blocks(client):
    prefix = [5] * 64
    client.generate(prefix, **exactly(1))
    with ExitStack() as stack:
        streams = [
            stack.enter_context(client.stream([*prefix, 9, i], **exactly(440))) for i in range(2)
        ]
        for stream in streams:
            next(stream)
        view = client.inspect()
    assert (view.block_size, view.num_blocks) == (16, NUM_BLOCKS + 1)
    first, second = view.sequences
    assert first.request_id != second.request_id and len(first.request_id) == 10
    assert first.status == second.status == "running"
    assert first.block_ids[:4] == second.block_ids[:4]
    assert not set(first.block_ids[4:]) & set(second.block_ids)
    assert first.num_prompt_tokens == 66 and first.num_tokens > 66
    assert not set(view.cached_block_ids) & {*first.block_ids, *second.block_ids}

"""Options of a model on a real server: limits of requests, and the prefix of its metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from paged_client import Client, InvalidRequest
from test_metrics import MODEL, read

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import RunningServer, start_server
from paged_backend.tools.demo import load_questions

pytestmark = pytest.mark.server
QUESTION = load_questions()[0]

# Options of a model, and what is over them.
NARROW = {
    **{"max_prompt_tokens": 40, "max_output_tokens": 5, "max_n": 2, "max_stop_strings": 2},
    **{"max_stop_length": 8, "max_logit_bias": 1, "max_json_length": 300, "max_json_depth": 2},
}
OVER = [
    ({"n": 3}, "n: must be at most max_n (2), got 3"),
    ({"max_tokens": 6}, "max_tokens: must be at most max_output_tokens (5), got 6"),
    ({"stop": ["a", "b", "c"]}, "stop: at most 2 strings (max_stop_strings), got 3"),
    ({"stop": "abcdefghi"}, "stop: at most 8 characters (max_stop_length), got 9"),
    ({"logit_bias": {"1": 1, "2": 1}}, "logit_bias: at most 1 entries (max_logit_bias), got 2"),
    ({"cache_salt": "x" * 300}, "has over 300 characters (max_json_length)"),
    ({"bad_words_token_ids": [[1]]}, "is nested deeper than 2 levels (max_json_depth)"),
]


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    repository = tmp_path_factory.mktemp("narrow")
    options = {"model": "demo", "metrics_prefix": "vllm:", **NARROW}
    write_model_repository(repository, MODEL, options, instances=1)
    with start_server(repository) as running:
        yield running


@pytest.fixture
def client(narrow: RunningServer) -> Iterator[Client]:
    with Client(narrow.grpc_url, MODEL, timeout=60) as client:
        yield client


def test_inspect_is_off_unless_asked_for_and_prefixes_can_be_chosen(
    narrow: RunningServer, client: Client
) -> None:
    with pytest.raises(InvalidRequest, match="^task: inspect is off; .* enable_inspect"):
        client.inspect()
    client.generate("hello", temperature=0, max_tokens=3)
    deadline = time.monotonic() + 60
    name = f'vllm:time_to_first_token_seconds_count{{model_name="{MODEL}"}}'
    while read(narrow)[name] != 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    page = read(narrow)
    assert not any(key.startswith("paged_") for key in page)
    (facts,) = (key for key in page if key.startswith("vllm:cache_config_info{"))
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert page[f'vllm:{name}{{model_name="{MODEL}"}}'] == 0
    assert page[facts] == 1 and 'block_size="16"' in facts and "num_gpu_blocks=" in facts


def test_limits_are_options_of_the_model(client: Client) -> None:
    for fields, message in OVER:
        with pytest.raises(InvalidRequest) as caught:
            client.generate("x", **fields)
        assert message in str(caught.value)
    with pytest.raises(InvalidRequest, match=r"^prompt: has \d+ tokens; at most 40 tokens \(max"):
        client.generate("word " * 60)
    # Without max_tokens an answer ends at the limit.
    answer = client.generate(QUESTION.question, max_tokens=None, ignore_eos=True)
    assert (len(answer.token_ids), answer.finish_reason) == (5, "length")

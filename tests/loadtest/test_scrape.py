"""Reading a server's metrics page: names, labels, histograms, and what is no such page."""

from __future__ import annotations

import http.server
import math
import re
import threading
import time

import pytest
from paged_loadtest.results import ServerSample
from paged_loadtest.sampling import SHOWN, server_sample, server_samples

from paged_backend.tools.scrape import Histogram, MetricsWatch, parse_page, scrape
from paged_backend.values.errors import ConfigError

# As Triton writes it: a histogram of counters, two models, and counters of its own.
PAGE = """\
# HELP nv_inference_count Number of inferences performed
# TYPE nv_inference_count counter
nv_inference_count{model="a",version="1"} 7
# TYPE paged_generation_tokens_total counter
paged_generation_tokens_total{model="a",version="1"} 100
paged_generation_tokens_total{model="b",version="1"} 11
# TYPE paged_request_success_total counter
paged_request_success_total{finished_reason="stop",model="a",version="1"} 4
paged_request_success_total{finished_reason="length",model="a",version="1"} 3
paged_request_success_total{finished_reason="length",model="b",version="1"} 1
# TYPE paged_num_requests_running gauge
paged_num_requests_running{model="a",version="1"} 5
paged_num_requests_running{model="b",version="1"} 1
paged_num_requests_waiting{model="a",version="1"} 2
paged_num_requests_waiting{model="b",version="1"} 0
paged_kv_cache_usage_perc{model="a",version="1"} 0.5
paged_kv_cache_usage_perc{model="b",version="1"} 0.1
# TYPE paged_time_to_first_token_seconds_bucket counter
paged_time_to_first_token_seconds_bucket{le="0.1",model="a",version="1"} 2
paged_time_to_first_token_seconds_bucket{le="0.2",model="a",version="1"} 6
paged_time_to_first_token_seconds_bucket{le="+Inf",model="a",version="1"} 8
paged_time_to_first_token_seconds_bucket{le="0.1",model="b",version="1"} 0
paged_time_to_first_token_seconds_bucket{le="0.2",model="b",version="1"} 1
paged_time_to_first_token_seconds_bucket{le="+Inf",model="b",version="1"} 1
# TYPE paged_time_to_first_token_seconds_sum counter
paged_time_to_first_token_seconds_sum{model="a",version="1"} 1.5
paged_time_to_first_token_seconds_sum{model="b",version="1"} 0.15
"""

# A peer's, with real histograms, a label of another name, and a second prefix beside it.
PEER = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="meta/llama"} 3.0
vllm:num_requests_running{engine="1",model_name="meta/llama"} 4.0
vllm:num_requests_waiting{engine="0",model_name="meta/llama"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="meta/llama"} 0.2
vllm:kv_cache_usage_perc{engine="1",model_name="meta/llama"} 0.4
# TYPE vllm:e2e_request_latency_seconds histogram
vllm:e2e_request_latency_seconds_bucket{engine="0",le="1.0",model_name="meta/llama"} 1.0
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="meta/llama"} 1.0
vllm:e2e_request_latency_seconds_count{engine="0",model_name="meta/llama"} 1.0
vllm:e2e_request_latency_seconds_sum{engine="0",model_name="meta/llama"} 0.25
"""


def test_values_are_of_all_models_or_of_one():
    both, one = parse_page(PAGE), parse_page(PAGE, model="b")
    assert both.value("generation_tokens_total") == 111
    assert one.value("generation_tokens_total") == 11
    assert both.by_label("request_success_total", "finished_reason") == {"stop": 4, "length": 4}
    assert both.by_label("num_requests_running", "model")
    assert not both.by_label("nv_inference_count", "model")
    assert both.by_label("absent_total", "finished_reason") == {}


def test_a_moment_of_the_server():
    assert server_sample(parse_page(PAGE, model="a"), 1.5) == ServerSample(1.5, 0.5, 5, 2)
    peer = server_sample(parse_page(PEER, model="meta/llama"), 2.0)
    assert peer == ServerSample(2.0, pytest.approx(0.3), 7, 0)


def test_a_prefix_of_ones_own_and_two_prefixes_on_one_page():
    own = parse_page(PAGE.replace("paged_", "acme:"), model="a")
    assert own.value("generation_tokens_total") == 100
    assert parse_page(PEER + PAGE).value("num_requests_running") == 6
    assert parse_page(PEER + PAGE, model="meta/llama").value("num_requests_running") == 7


def test_histograms_of_counters_and_real_ones():
    first_token = parse_page(PAGE, model="a").histogram("time_to_first_token_seconds")
    assert first_token == Histogram((0.1, 0.2, math.inf), (2, 6, 8), 1.5)
    latency = parse_page(PEER).histogram("e2e_request_latency_seconds")
    assert latency is not None and latency.mean == 0.25
    assert parse_page(PAGE).histogram("inter_token_latency_seconds") is None


def test_buckets_read_in_the_middle_of_an_update_stay_in_order():
    page = PAGE.replace('le="0.1",model="a",version="1"} 2', 'le="0.1",model="a",version="1"} 7')
    histogram = parse_page(page, model="a").histogram("time_to_first_token_seconds")
    assert histogram is not None and histogram.counts == (7, 7, 8)


@pytest.mark.parametrize(
    ("q", "value"),
    [(0.0, 0.0), (0.125, 0.05), (0.25, 0.1), (0.5, 0.15), (0.75, 0.2), (0.9, math.inf)],
)
def test_quantiles_are_those_of_promql(q, value):
    histogram = Histogram((0.1, 0.2, math.inf), (2, 6, 8), 1.5)
    assert histogram.quantile(q) == pytest.approx(value)


def test_what_came_between_two_scrapes():
    earlier = Histogram((0.1, 0.2, math.inf), (2, 6, 8), 1.5)
    later = Histogram((0.1, 0.2, math.inf), (2, 10, 12), 2.1)
    between = later.since(earlier)
    assert between.counts == (0, 4, 4)
    assert between.mean == pytest.approx(0.15)
    assert between.quantile(0.5) == pytest.approx(0.15)
    assert later.since(later).mean is None and later.since(later).quantile(0.5) is None
    assert earlier.since(later) == earlier  # the server was started again


@pytest.mark.parametrize(
    ("page", "model", "message"),
    [
        ("", None, "shows no engine"),
        ('nv_inference_count{model="a"} 7', None, "shows no engine"),
        ("<html>not found</html>", None, "no Prometheus metrics page"),
        (PAGE, "c", "no engine of the model 'c'; it has: a, b"),
    ],
)
def test_what_is_no_page_of_an_engine(page, model, message):
    with pytest.raises(ConfigError, match=message):
        parse_page(page, model)


def test_a_metric_that_is_missing_is_named():
    with pytest.raises(ConfigError, match="shows no kv_blocks_total"):
        parse_page(PEER).value("kv_blocks_total")


class _Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):  # noqa: N802
        self.send_response(200 if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(PAGE.encode())

    def log_message(self, *args):
        pass


def test_a_page_from_its_address():
    with http.server.HTTPServer(("127.0.0.1", 0), _Page) as server:
        address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            assert scrape(f"{address}/metrics", "a").value("num_requests_running") == 5
            with pytest.raises(ConfigError, match=f"{address}/metrics: .*it has: a, b"):
                scrape(f"{address}/metrics", "c")
            with pytest.raises(ConfigError, match="cannot read metrics at .*Not Found"):
                scrape(f"{address}/", "a")
        finally:
            server.shutdown()
            thread.join()
    with pytest.raises(ConfigError, match=r"cannot read metrics at http://\S+: .*refused"):
        scrape(f"{address}/metrics")


class _OtherPage(_Page):
    """Every other answer is an error, or a page that lacks the KV cache's metric."""

    count = 0

    def do_GET(self) -> None:
        _OtherPage.count += 1
        if _OtherPage.count % 2:
            self.send_error(503)
        elif _OtherPage.count == 2:
            page = re.sub("(?m)^paged_kv_cache.*$", "", PAGE)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page.encode())
        else:
            super().do_GET()


def test_what_cannot_be_read_meanwhile_is_left_out():
    with http.server.HTTPServer(("127.0.0.1", 0), _OtherPage) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/metrics"
            with MetricsWatch(url, SHOWN, "a", interval_s=0.001) as watch:
                while len(watch.readings) < 3:
                    time.sleep(0.001)
        finally:
            server.shutdown()
            thread.join()
    samples = server_samples(watch)
    assert len(samples) == len(watch.readings) - 1
    times = [sample.at_s for sample in samples]
    assert times == sorted(times) and times[0] > 0
    assert {(sample.kv_usage, sample.num_running) for sample in samples} == {(0.5, 5)}


@pytest.mark.parametrize("url", ["localhost:8002", "http://", "no address"])
def test_what_is_no_address(url):
    with pytest.raises(ConfigError, match="cannot read metrics at"):
        scrape(url)

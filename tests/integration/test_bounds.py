"""Time that a caller gives, and room that the server has: what is over either is told at once."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from metrics_page import read_metrics
from paged_client import Client, RequestTimeout, Unavailable
from tritonclient.grpc import InferenceServerClient, InferInput

from paged_backend.launch.repository import write_model_repository
from paged_backend.launch.server_process import start_server

pytestmark = pytest.mark.server
OPTIONS = {
    "model": "demo",
    "max_num_seqs": 2,
    "max_waiting_requests": 2,
    "max_tenant_request_rate": 5,
}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server with two seats, and two places to wait."""
    folder = tmp_path_factory.mktemp("repository")
    write_model_repository(folder, "paged_llm", OPTIONS, instances=2)
    with start_server(folder) as server:
        yield server


@contextmanager
def busy(server, num_streams) -> Iterator[list]:
    """So many long streams, each of a connection of its own; the first two run."""
    with ExitStack() as stack:
        streams = []
        for _ in range(num_streams):
            client = stack.enter_context(Client(server.grpc_url, timeout=60))
            stream = client.stream(
                "x", max_tokens=1900, ignore_eos=True, tenant=f"busy-{uuid.uuid4()}"
            )
            stack.callback(stream.cancel)
            streams.append(stream)
            if len(streams) <= 2:
                next(stream)
        wait_for(server, "num_requests_waiting", num_streams - 2)
        yield streams
    wait_for(server, "kv_blocks_used", 0)


def wait_for(server, name, value):
    deadline = time.monotonic() + 60
    while read_metrics(server.metrics_url)[name] != value:
        assert time.monotonic() < deadline, (name, value)
        time.sleep(0.01)


def test_a_request_of_its_own_timeout_ends_while_it_runs(small):
    with Client(small.grpc_url, timeout=60) as client:
        started = time.monotonic()
        heard = 0
        with pytest.raises(RequestTimeout, match=r"^deadline: timeout_s \(0.3\) is over"):
            for chunk in client.stream("x", max_tokens=1900, ignore_eos=True, timeout_s=0.3):
                heard += chunk.num_output_tokens
        assert time.monotonic() - started > 0.25
        assert heard < 1900
    wait_for(small, "kv_blocks_used", 0)


def test_and_while_it_waits(small):
    with busy(small, 2), Client(small.grpc_url, timeout=60) as client:
        started = time.monotonic()
        with pytest.raises(RequestTimeout, match="^deadline:"):
            client.generate("x", max_tokens=4, timeout_s=0.2)
        assert time.monotonic() - started > 0.15
        wait_for(small, "num_requests_waiting", 0)
        assert read_metrics(small.metrics_url)["num_requests_running"] == 2  # no seat became free


def test_tritons_own_timeout_counts_too(small):
    errors = []
    with InferenceServerClient(small.grpc_url) as client:
        client.start_stream(lambda result, error: errors.append(error))
        prompt = InferInput("text_input", [1], "BYTES")
        prompt.set_data_from_numpy(np.array([b"x"], object))
        options = InferInput("sampling_parameters", [1], "BYTES")
        wanted = json.dumps({"max_tokens": 1900, "ignore_eos": True}).encode()
        options.set_data_from_numpy(np.array([wanted], object))
        client.async_stream_infer("paged_llm", [prompt, options], timeout=300_000)
        client.stop_stream()
    assert [str(error) for error in errors] == ["deadline: timeout_s (0.3) is over"]


def test_one_too_many_is_refused_at_once_and_the_others_go_on(small):
    before = read_metrics(small.metrics_url)["request_refused_total"]
    with busy(small, 4) as streams, Client(small.grpc_url, timeout=60) as client:
        for _ in range(3):
            with pytest.raises(Unavailable, match=r"^queue_full: 2 requests wait.*retry after \d"):
                client.generate("x", max_tokens=4, tenant="one too many")
        shown = read_metrics(small.metrics_url)  # nobody had to end before they were told
        assert (shown["num_requests_running"], shown["num_requests_waiting"]) == (2, 2)
        assert next(streams[0]).token_ids
    wait_for(small, "request_refused_total", before + 3)


def test_a_tenant_that_asks_too_often_is_refused_and_no_other(small):
    with Client(small.grpc_url, timeout=60) as client:

        def ask(_: int) -> str:
            try:
                client.generate("x", max_tokens=1, tenant="eager")
            except Unavailable as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(2) as pool:  # as many as there are seats: nobody has to wait
            texts = list(pool.map(ask, range(60)))
        refused = [text for text in texts if text]
        assert len(texts) - len(refused) >= 10  # two seconds' worth at once
        assert refused
        assert all(
            text.startswith("rate_limited: tenant 'eager' is over max_tenant_request_rate; retry")
            for text in refused
        )
        client.generate("x", max_tokens=1, tenant="calm")

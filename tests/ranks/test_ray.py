"""Ray starts the nodes of a model on the hosts of its cluster; skipped where Ray is not installed.

Ray is not in the environment of tests, because it is large. CONTRIBUTING.md says how to run this.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from callers import Crowd, ask_all, greedy
from checkpoints import make_checkpoint
from oracle import make_engine
from requests_of_every_sort import NUM_EACH, all_sorts, answers_of
from servers import restarts, serve_demo, wait_for, wait_loaded

from paged_backend.launch.ports import bind
from paged_backend.values.errors import ConfigError

OPTIONS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "nnodes": 2,
    "distributed_executor_backend": "ray",
    "distributed_timeout_seconds": 60,
    "cpu_threads": 1,
}


def test_it_needs_two_nodes(tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    with pytest.raises(ConfigError, match="can be ray only with 2 nnodes or more"):
        make_engine(tmp_path, **{**OPTIONS, "nnodes": 1})


def test_the_extra_is_named_where_ray_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint("llama3", tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'paged-backend\[ray\]'"):
        make_engine(tmp_path, **OPTIONS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two nodes on this machine; each has a core."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'paged-backend[ray]'")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    os.environ["RAY_ADDRESS"] = made.address
    yield made
    import ray

    ray.shutdown()
    del os.environ["RAY_ADDRESS"]
    made.shutdown()


def free_port() -> int:
    with bind("127.0.0.1", 0, "port") as free:
        return int(free.getsockname()[1])


def test_two_hosts_of_ray_answer_as_one(cluster: Any, tmp_path: Path) -> None:
    make_checkpoint("llama3", tmp_path)
    few = all_sorts()[NUM_EACH - 1 : NUM_EACH + 1]
    steps = {"max_num_seqs": 5, "max_num_batched_tokens": 32}
    one = answers_of(make_engine(tmp_path, **steps), few)
    engine = make_engine(tmp_path, **steps, **OPTIONS, master_port=free_port())
    assert answers_of(engine, few).tokens == one.tokens
    del engine


@pytest.mark.server
def test_the_loss_of_a_host_of_ray_costs_no_stream_a_token(cluster: Any, tmp_path: Path) -> None:
    asks = [greedy(index, 400) for index in range(8)]
    options = {**OPTIONS, "master_port": free_port(), "max_crashes_per_request": 9}
    with serve_demo(tmp_path, **options, step_timeout_s=5) as server:
        expected = [call.token_ids for call in ask_all(server, asks)]
        (other,) = (node for node in cluster.list_all_nodes() if not node.head)
        with Crowd(server, asks, timeout_s=600) as crowd:
            wait_for(lambda: crowd.have_tokens(20), 60)
            started = time.monotonic()
            cluster.remove_node(other, allow_graceful=False)
            cluster.add_node(num_cpus=1)
            wait_loaded(server, 1)
            print(f"\na host is removed: {time.monotonic() - started:.1f} s until the next engine")
        assert [call.token_ids for call in crowd.calls] == expected
        assert restarts(server) == 1

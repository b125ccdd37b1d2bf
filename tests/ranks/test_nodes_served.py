"""A server of a model that two hosts compute: equal tokens, also when a host or a rank is lost.

`tests/test_helm.py` loses a host in each run of the tests; this is the long version.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from callers import Call, Crowd, ask_all, greedy
from hosts import Hosts, two_hosts, worker
from servers import engine_of, restarts, serve_demo, wait_for, wait_loaded

from paged_backend.launch.server_process import RunningServer

pytestmark = pytest.mark.server


def tokens(calls: list[Call]) -> list[list[tuple[int, ...]]]:
    return [call.token_ids for call in calls]


class Cluster:
    """A server on this host, and a worker on another one."""

    def __init__(self, server: RunningServer, hosts: Hosts, key: Path) -> None:
        self.server = server
        self.hosts = hosts
        self._key = key
        self._running = ExitStack()

    def start_worker(self) -> None:
        self._worker = self._running.enter_context(worker(self.hosts, self._key))

    def rank(self) -> psutil.Process:
        """The process of the other host's rank."""
        children = psutil.Process(self._worker.pid).children()
        return next(p for p in children if "rank_process" in " ".join(p.cmdline()))

    def lose_worker(self) -> None:
        """Kill the worker, and start another one later."""
        self._worker.kill()
        time.sleep(1)
        self.start_worker()

    def delay(self) -> None:
        """Stop the rank of the other host for less time than a step may take."""
        rank = self.rank()
        rank.send_signal(signal.SIGSTOP)
        time.sleep(1)
        rank.send_signal(signal.SIGCONT)

    def lose_network(self) -> None:
        """Cut the network for longer than a step may take."""
        self.hosts.cut(True)
        time.sleep(6)
        self.hosts.cut(False)

    def close(self) -> None:
        self._running.close()


FAULTS: dict[str, Callable[[Cluster], None]] = {
    "engine is killed": lambda cluster: engine_of(cluster.server).kill(),
    "rank of the other host is killed": lambda cluster: cluster.rank().kill(),
    "rank of the other host is stopped": lambda cluster: cluster.rank().send_signal(signal.SIGSTOP),
    "worker is killed": Cluster.lose_worker,
    "network is cut": Cluster.lose_network,
}


@contextmanager
def running(folder: Path, **options: Any) -> Iterator[Cluster]:
    """A cluster that is ready; its worker starts first, and waits."""
    key = folder / "key"
    key.write_text("a secret of all hosts of this test")
    key.chmod(0o600)
    with two_hosts() as hosts, ExitStack() as closing:
        where = {"master_addr": hosts.address, "master_port": hosts.port}
        first = closing.enter_context(worker(hosts, key))
        with serve_demo(
            folder,
            tensor_parallel_size=2,
            nnodes=2,
            cluster_key_file=str(key),
            step_timeout_s=3,
            distributed_timeout_seconds=60,
            cpu_threads=1,
            **where,
            **options,
        ) as server:
            cluster = Cluster(server, hosts, key)
            cluster._worker = first
            try:
                yield cluster
            finally:
                cluster.close()


def hurt(cluster: Cluster, what: str, expected: Any, asks: list[Any]) -> None:
    """Do it under streams, which must get the tokens that they would have had."""
    before = restarts(cluster.server)
    with Crowd(cluster.server, asks, timeout_s=600) as crowd:
        wait_for(lambda: crowd.have_tokens(20), 60)
        started = time.monotonic()
        FAULTS[what](cluster)
        wait_loaded(cluster.server, before + 1)
        print(f"\n{what}: {time.monotonic() - started:.1f} s until the next engine is loaded")
    assert tokens(crowd.calls) == expected, what


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_32_streams_survive_ten_faults_of_each_sort(tmp_path: Path) -> None:
    number = int(os.environ.get("NODE_FAULTS", "10"))
    many = [greedy(index, 400) for index in range(32)]
    with running(tmp_path, instances=2, max_crashes_per_request=100) as cluster:
        expected = tokens(ask_all(cluster.server, many))
        for what in FAULTS:
            if what == "network is cut" and not cluster.hosts.link:
                continue
            for _ in range(number):
                hurt(cluster, what, expected, many)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_32_streams_wait_for_a_host_that_is_late_ten_times(tmp_path: Path) -> None:
    number = int(os.environ.get("NODE_FAULTS", "10"))
    many = [greedy(index, 400) for index in range(32)]
    with running(tmp_path, instances=2) as cluster:
        expected = tokens(ask_all(cluster.server, many))
        for _ in range(number):
            with Crowd(cluster.server, many, timeout_s=600) as crowd:
                wait_for(lambda crowd=crowd: crowd.have_tokens(20), 60)
                cluster.delay()
            assert tokens(crowd.calls) == expected
        assert restarts(cluster.server) == 0

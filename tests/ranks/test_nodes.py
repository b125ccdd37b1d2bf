"""Several hosts, as processes on loopback: who may join, who may not, and what a loss costs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from checkpoints import make_checkpoint
from oracle import make_engine
from requests_of_every_sort import NUM_EACH, all_sorts, answers_of

from paged_backend.checkpoint.fingerprint import fingerprint
from paged_backend.engine.engine import Engine
from paged_backend.engine.node_sockets import connect, listen
from paged_backend.engine.remote_ranks import RemoteRanks
from paged_backend.executor.messages import JoinGroup, decode_first, encode, own_version
from paged_backend.launch.ports import bind
from paged_backend.values.errors import ConfigError, EngineDead
from paged_backend.values.nodes import Nodes

KEY = b"the secret of all nodes of this test"
STEPS: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "max_model_len": 128}


def free_nodes(number: int = 2, rank: int = 0) -> Nodes:
    """Nodes with a free port."""
    with bind("127.0.0.1", 0, "port") as free:
        return Nodes(number, rank, "127.0.0.1", free.getsockname()[1])


class Context(zmq.Context[zmq.Socket[bytes]]):
    """Keeps its sockets, which would otherwise close when a test drops them."""

    def socket(self, *args: Any, **kwargs: Any) -> Any:
        made = super().socket(*args, **kwargs)
        self.__dict__.setdefault("made", []).append(made)
        return made


@pytest.fixture
def context() -> Iterator[Context]:
    made = Context()
    yield made
    made.destroy(linger=0)


@contextmanager
def waiting(context: Context, nodes: Nodes, timeout_s: float = 20) -> Iterator[RemoteRanks]:
    """Node 0 with one rank for each node; when the block ends, it waits until all have joined."""
    remote = RemoteRanks(context, nodes, "127.0.0.1", KEY, 1)
    with ThreadPoolExecutor(1) as thread:
        joined = thread.submit(remote.wait_until_started, timeout_s)
        yield remote
        joined.result()


def join(
    context: Context, nodes: Nodes, version: str | None = None, key: bytes = KEY
) -> zmq.Socket[bytes]:
    node = connect(context, nodes, key)
    version = own_version() if version is None else version
    with suppress(zmq.Again):  # a stranger may have been refused already, and then has no peer
        node.send(encode(JoinGroup(version, nodes.rank, nodes.number)), zmq.DONTWAIT)
    return node


def node(nodes: Nodes, rank: int, number: int | None = None) -> Nodes:
    return Nodes(number or nodes.number, rank, nodes.address, nodes.port)


# --- who may join --------------------------------------------------------------------------------


def refusal(asking: zmq.Socket[bytes]) -> str:
    assert asking.poll(5000)
    return str(decode_first(asking.recv()).problem)


def test_nodes_that_cannot_take_part_are_told_why(context: Context) -> None:
    nodes = free_nodes(2)
    with waiting(context, nodes):
        old = join(context, node(nodes, 1), "0.0.1 (messages 12345678)")
        assert refusal(old) == (
            f"node 0 runs paged-backend {own_version()}, and node 1 runs paged-backend 0.0.1 "
            "(messages 12345678): all nodes need the same version"
        )
        stranger = connect(context, node(nodes, 1), KEY)
        stranger.send(b"of another program")
        assert "the node another version" in refusal(stranger)
        wide = join(context, node(nodes, 1, number=3))
        assert refusal(wide) == "nnodes is 2 at node 0 and 3 at node 1"
        assert refusal(join(context, node(nodes, 0))) == (
            "there is no place for node 0: nnodes is 2"
        )
        join(context, node(nodes, 1))


def test_a_number_is_taken_while_its_node_is_connected(context: Context) -> None:
    nodes = free_nodes(3)
    with waiting(context, nodes):
        first = join(context, node(nodes, 1))
        time.sleep(0.2)
        again = "node_rank 1 is that of another node, which is connected"
        assert refusal(join(context, node(nodes, 1))) == again
        first.close()
        time.sleep(0.2)
        join(context, node(nodes, 1))  # the same host, started again
        join(context, node(nodes, 2))


def test_missing_ranks_are_named(context: Context) -> None:
    nodes = free_nodes(4)
    with pytest.raises(ConfigError, match=r"^node 1 \(rank 1\) and node 3 \(rank 3\) did not join"):
        # The other node must join within this time, however busy the machine is.
        with waiting(context, nodes, timeout_s=3):
            join(context, node(nodes, 2))


def test_a_node_that_is_gone_is_noticed_at_once(context: Context) -> None:
    nodes = free_nodes(2)
    with waiting(context, nodes) as remote:
        other = join(context, node(nodes, 1))
    remote.check()
    other.close()
    started = time.monotonic()
    with pytest.raises(EngineDead, match=r"node 1 \(rank 1\) is gone"):
        while time.monotonic() - started < 2:
            remote.check()


def test_a_port_in_use_and_an_address_of_another_host(context: Context) -> None:
    nodes = free_nodes()
    with closing(listen(context, nodes, "127.0.0.1", KEY)):
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1, port {nodes.port} "):
            listen(context, nodes, "127.0.0.1", KEY)
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        listen(context, nodes, "192.0.2.1", KEY)


# --- who may not ---------------------------------------------------------------------------------


def test_strangers_cost_nothing(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    """They send nothing, garbage, or messages without the secret or with another one."""
    monkeypatch.setattr("paged_backend.engine.node_sockets._HANDSHAKE_MS", 1000)
    nodes, process, strangers = free_nodes(2), psutil.Process(), Context()
    with waiting(context, nodes) as remote:
        guessing = join(strangers, node(nodes, 1), key=b"a guess" * 8)
        plain = strangers.socket(zmq.DEALER)
        plain.connect(f"tcp://127.0.0.1:{nodes.port}")
        with suppress(zmq.Again):  # it may have been refused already, and then there is no peer
            plain.send(encode(JoinGroup(own_version(), 1, 2)), zmq.DONTWAIT)
        before = process.num_threads(), process.num_fds(), process.memory_info().rss
        silent = [socket.create_connection(("127.0.0.1", nodes.port)) for _ in range(400)]
        for each in silent[200:]:
            each.sendall(os.urandom(4096))
        time.sleep(2)
        for each in silent:
            each.close()
        threads, files, memory = process.num_threads(), process.num_fds(), process.memory_info().rss
        assert (threads, files) <= (before[0], before[1] + 4)
        assert memory - before[2] < 16 * 2**20
        assert not plain.poll(0) and not guessing.poll(0)
        join(context, node(nodes, 1))
    assert remote.receive() == []  # only now: the other thread has used the socket
    strangers.destroy(linger=0)


def test_messages_are_encrypted(context: Context) -> None:
    nodes, seen = free_nodes(2), bytearray()
    with bind("127.0.0.1", 0, "port") as between:
        between.listen()
        threading.Thread(target=pass_on, args=(between, nodes.port, seen), daemon=True).start()
        with waiting(context, nodes) as remote:
            there = Nodes(2, 1, "127.0.0.1", between.getsockname()[1])
            other = join(context, there)
        remote.send(b"a prompt of a user")
        assert other.recv() == b"a prompt of a user"
    assert len(seen) > 200 and b"prompt" not in seen and own_version().encode() not in seen


def pass_on(between: socket.socket, port: int, seen: bytearray) -> None:
    """Forward the bytes of one connection, and keep them."""
    client, _ = between.accept()
    server = socket.create_connection(("127.0.0.1", port))

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # the other thread has closed it
            while data := source.recv(65536):
                seen.extend(data)
                target.sendall(data)

    with client, server:
        threading.Thread(target=copy, args=(server, client), daemon=True).start()
        copy(client, server)


# --- what they compute ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worker() -> Iterator[tuple[Nodes, subprocess.Popen[bytes]]]:
    """A running `paged-backend worker` as node 1 of two."""
    nodes = free_nodes(2, rank=1)
    flags = ["--nnodes", "2", "--node-rank", "1", "--master-port", str(nodes.port)]
    command = [sys.executable, "-m", "paged_backend.cli", "worker", *flags]
    environment = {**os.environ, "PAGED_CLUSTER_KEY": KEY.decode()}
    process = subprocess.Popen(command, env=environment)
    yield nodes, process
    process.terminate()
    assert process.wait(10) == 0


@pytest.fixture
def engine_on_nodes(
    worker: tuple[Nodes, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Makes an engine on both nodes, with four ranks."""
    monkeypatch.setenv("PAGED_CLUSTER_KEY", KEY.decode())
    monkeypatch.setenv("NNODES", "2")
    monkeypatch.setenv("MASTER_PORT", str(worker[0].port))

    def make(folder: Path, **options: Any) -> Engine:
        defaults = {
            "tensor_parallel_size": 2,
            "cpu_threads": 2,
            "distributed_timeout_seconds": 60,
        }
        return make_engine(folder, **{**defaults, **STEPS, **options})

    return make


def heads(folder: Path) -> Path:
    make_checkpoint("llama3", folder, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    return folder


def rank_of(process: subprocess.Popen[bytes]) -> psutil.Process:
    children = psutil.Process(process.pid).children()
    return next(p for p in children if "rank_process" in " ".join(p.cmdline()))


def test_two_hosts_answer_as_one(engine_on_nodes: Any, tmp_path: Path) -> None:
    """Each host is a stage with two ranks."""
    few = all_sorts()[NUM_EACH - 1 : NUM_EACH + 1]
    one = answers_of(make_engine(heads(tmp_path), **STEPS), few)
    engine = engine_on_nodes(tmp_path, pipeline_parallel_size=2)
    assert answers_of(engine, few).tokens == one.tokens
    assert engine.executor.info.num_ranks == 4


def test_the_end_of_a_rank_of_another_host_ends_the_engine(
    engine_on_nodes: Any, worker: tuple[Nodes, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    engine = engine_on_nodes(heads(tmp_path))
    engine.executor.check()
    rank_of(worker[1]).kill()
    with pytest.raises(EngineDead, match="^engine_dead: rank 1 ended: killed by SIGKILL$"):
        answers_of(engine)
    del engine
    engine = engine_on_nodes(tmp_path)  # its node has started a rank again
    answers_of(engine)


def test_a_host_without_the_same_model_is_named(
    engine_on_nodes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads(tmp_path)
    monkeypatch.setattr(
        "paged_backend.engine.leading_worker.fingerprint", lambda folder: "of another model"
    )
    with pytest.raises(ConfigError, match=f"^node 1: {tmp_path} is another model than that of"):
        engine_on_nodes(tmp_path)


def test_a_model_is_known_by_its_config_and_the_sizes_of_its_weights(tmp_path: Path) -> None:
    model = heads(tmp_path)
    first = fingerprint(model)
    (model / "README.md").write_text("not a part of it")
    assert fingerprint(model) == first
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    second = fingerprint(model)
    (model / "more.safetensors").write_bytes(b"0")
    assert len({first, second, fingerprint(model)}) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 3}, r"option nnodes must divide the number of ranks \(2\), got 3"),
        ({"nnodes": 2, "node_rank": 1}, "option node_rank must be 0 for the server, got 1"),
        ({"nnodes": 2}, "option cluster_key_file must name a file"),
        ({"nnodes": 2, "tensor_parallel_size": 1}, "option nnodes must divide the number of"),
    ],
)
def test_a_server_names_what_is_wrong(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    values = {"tensor_parallel_size": 2, **options}
    with pytest.raises(ConfigError, match=message):
        make_engine(heads(tmp_path), **values)

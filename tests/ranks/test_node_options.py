"""Which hosts compute together: options, the environments of torchrun and LeaderWorkerSet."""

from __future__ import annotations

from pathlib import Path

import pytest

from paged_backend.cli import main
from paged_backend.engine.rank_processes import _start
from paged_backend.values.errors import ConfigError
from paged_backend.values.nodes import Nodes, read_key
from paged_backend.values.options.nodes import NodeOptions

TORCHRUN = {
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
LEADER_WORKER_SET = {
    "LWS_GROUP_SIZE": "2",
    "LWS_WORKER_INDEX": "1",
    "LWS_LEADER_ADDRESS": "llm-server-0.llm-server.models",
}


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ({}, {}, Nodes(1, 0, "127.0.0.1", 29501)),
        ({}, TORCHRUN, Nodes(3, 2, "10.0.0.1", 29500)),
        ({}, LEADER_WORKER_SET, Nodes(2, 1, "llm-server-0.llm-server.models", 29501)),
        ({"node_rank": 1, "master_port": 5000}, TORCHRUN, Nodes(3, 1, "10.0.0.1", 5000)),
        ({"nnodes": 4}, LEADER_WORKER_SET | TORCHRUN, Nodes(4, 2, "10.0.0.1", 29500)),
        ({"nnodes": 1}, TORCHRUN, Nodes(1, 0, "127.0.0.1", 29501)),
    ],
)
def test_an_option_comes_before_the_environment(
    options: dict[str, int], environment: dict[str, str], expected: Nodes
) -> None:
    assert Nodes.of(NodeOptions(**options), environment) == expected


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (
            {},
            {"NNODES": "1:4"},
            "the variable NNODES must be an integer from 1 up to 64, got '1:4'",
        ),
        ({}, TORCHRUN | {"MASTER_PORT": "0"}, "the variable MASTER_PORT must be an integer from 1"),
        ({}, TORCHRUN | {"LOCAL_WORLD_SIZE": "2"}, r"LOCAL_WORLD_SIZE must be 1 \(torchrun"),
        ({"node_rank": 3}, TORCHRUN, r"node_rank must be less than nnodes \(3\), got 3"),
    ],
)
def test_what_is_wrong_is_named(
    options: dict[str, int], environment: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Nodes.of(NodeOptions(**options), environment)


def test_a_node_has_an_equal_part_of_the_ranks() -> None:
    nodes = Nodes(3, 0, "127.0.0.1", 29501)
    assert nodes.ranks_of_node(6) == 2
    with pytest.raises(ConfigError, match=r"nnodes must divide the number of ranks \(4\), got 3"):
        nodes.ranks_of_node(4)


def test_the_secret_comes_from_a_private_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("k" * 32 + "\n")
    file.chmod(0o440)  # as a Secret of Kubernetes
    options = NodeOptions(cluster_key_file=str(file))
    assert read_key(options, {"PAGED_CLUSTER_KEY": "e" * 40}) == b"k" * 32
    assert read_key(NodeOptions(), {"PAGED_CLUSTER_KEY": "e" * 40}) == b"e" * 40
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read the secret"):
        read_key(options, {})
    with pytest.raises(ConfigError, match="cluster_key_file must name a file with the secret"):
        read_key(NodeOptions(), {})
    with pytest.raises(ConfigError, match="must have a secret of 32 characters or more, but has 5"):
        read_key(NodeOptions(), {"PAGED_CLUSTER_KEY": "short"})
    with pytest.raises(ConfigError, match="cannot read"):
        read_key(NodeOptions(cluster_key_file=str(tmp_path / "missing")), {})


def test_ranks_do_not_get_the_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGED_CLUSTER_KEY", "k" * 32)
    process = _start(tmp_path, 1)
    file = Path(f"/proc/{process.pid}/environ")
    while not (environment := file.read_bytes()):  # the new program is not set up yet
        assert process.poll() is None
    process.kill()
    process.wait()
    assert b"PATH=" in environment and b"PAGED_CLUSTER_KEY" not in environment


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "option nnodes must be 2 or more"),
        (["--nnodes", "2"], "option node_rank must be 1 or more: node 0 runs paged-backend serve"),
        (["--nnodes", "65"], "option nnodes must be an integer from 1 up to 64 or null, got 65"),
        (["--nnodes", "2", "--node-rank", "1"], "option cluster_key_file must name a file"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["worker", *flags]) == 2
    assert message in capsys.readouterr().err

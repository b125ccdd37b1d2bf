"""Which hosts compute a model together, by options and environment, and the secret they share."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_backend.values.errors import ConfigError, option_error
from paged_backend.values.options.nodes import NodeOptions
from paged_backend.values.regular_file import check_regular, read_text
from paged_backend.values.validation import from_string, shorten

KEY_VARIABLE = "PAGED_CLUSTER_KEY"
MIN_KEY_LENGTH = 32
_MAX_KEY_LENGTH = 4096
_OTHERS = 0o007  # permissions of users who are neither the owner nor in the group

# By field of Nodes. torchrun's variables come first, then those of LeaderWorkerSet.
_VARIABLES = {
    "nnodes": ("NNODES", "WORLD_SIZE", "LWS_GROUP_SIZE"),
    "node_rank": ("NODE_RANK", "GROUP_RANK", "LWS_WORKER_INDEX"),
    "master_addr": ("MASTER_ADDR", "LWS_LEADER_ADDRESS"),
    "master_port": ("MASTER_PORT",),
}
_DEFAULTS = NodeOptions(nnodes=1, node_rank=0, master_addr="127.0.0.1", master_port=29501)


@dataclass(frozen=True, slots=True)
class Nodes:
    """The hosts that compute a model together; node 0 has its server.

    Attributes:
        number: how many there are.
        rank: number of this node, counted from 0.
        address: host name or address of node 0.
        port: where node 0 waits for the others.
    """

    number: int
    rank: int
    address: str
    port: int

    @classmethod
    def of(cls, options: NodeOptions, environment: Mapping[str, str]) -> Nodes:
        """Read the options, or else the variables of torchrun or LeaderWorkerSet.

        Raises:
            ConfigError: a value is not allowed; the message names the option or the variable.
        """
        if options.nnodes == 1:  # no variable matters
            environment = {}
        read: dict[str, Any] = {name: _value(name, options, environment) for name in _VARIABLES}
        nodes = cls(*read.values())
        if nodes.rank >= nodes.number:
            problem = f"must be less than nnodes ({nodes.number}), got {nodes.rank}"
            raise option_error("node_rank", problem)
        return nodes

    def ranks_of_node(self, num_ranks: int) -> int:
        """Return the number of ranks of each node.

        Raises:
            ConfigError: the nodes cannot have equally many ranks.
        """
        if num_ranks % self.number:
            raise option_error(
                "nnodes", f"must divide the number of ranks ({num_ranks}), got {self.number}"
            )
        return num_ranks // self.number


def read_key(options: NodeOptions, environment: Mapping[str, str]) -> bytes:
    """Return the secret that all nodes share.

    Raises:
        ConfigError: there is none, it is too short, or other users can read its file.
    """
    if options.cluster_key_file is not None:
        path = Path(options.cluster_key_file).expanduser()
        source, key = str(path), _read_private(path)
    elif KEY_VARIABLE in environment:
        source, key = KEY_VARIABLE, environment[KEY_VARIABLE]
    else:
        raise option_error(
            "cluster_key_file",
            f"must name a file with the secret of the nodes, or {KEY_VARIABLE} must hold it: "
            "several nodes trust each other by it",
        )
    key = key.strip()
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigError(
            f"{source} must have a secret of {MIN_KEY_LENGTH} characters or more, but has "
            f"{len(key)}: `openssl rand -hex 32` makes one"
        )
    return key.encode()


def without_key(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a child process that has no use for the secret."""
    return {name: value for name, value in environment.items() if name != KEY_VARIABLE}


def _read_private(path: Path) -> str:
    check_regular(path)
    # Kubernetes lets the group of a pod read its secrets.
    if os.stat(path).st_mode & _OTHERS:
        raise ConfigError(f"{path}: other users can read the secret of the nodes; chmod 600 it")
    return read_text(path, _MAX_KEY_LENGTH)


def _value(name: str, options: NodeOptions, environment: Mapping[str, str]) -> int | str:
    value: int | str | None = getattr(options, name)
    if value is not None:
        return value
    found = next((each for each in _VARIABLES[name] if each in environment), None)
    if found is None:
        default: int | str = getattr(_DEFAULTS, name)
        return default
    text = environment[found]
    if found == "WORLD_SIZE" and environment.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            "LOCAL_WORLD_SIZE must be 1 (torchrun --nproc-per-node 1): each node is one process, "
            "which starts the node's ranks"
        )
    rule = NodeOptions.__dataclass_fields__[name].metadata["rule"]
    read: int | str = from_string(rule.kind, text)
    if not rule.accepts(read):
        allowed = rule.describe().removesuffix(" or null")
        raise ConfigError(f"the variable {found} must be {allowed}, got {shorten(text)}")
    return read

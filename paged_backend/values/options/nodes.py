"""The nodes: several hosts that compute one model together."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.values.validation import Rule, checked

MAX_NODES = 64


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Options of the server and of ``paged-backend worker``; names are vLLM's.

    An option that is None has the value of an environment variable; see
    :class:`paged_backend.values.nodes.Nodes`.
    """

    nnodes: int | None = checked(
        None,
        Rule(int, 1, MAX_NODES, optional=True),
        "number of hosts (nodes) that compute the model together, each with an equal part of the "
        "ranks; default: NNODES, WORLD_SIZE or LWS_GROUP_SIZE of the environment, or else 1",
    )
    node_rank: int | None = checked(
        None,
        Rule(int, 0, MAX_NODES - 1, optional=True),
        "number of this node; the server is node 0, and each other node runs paged-backend "
        "worker; default: NODE_RANK, GROUP_RANK or LWS_WORKER_INDEX of the environment, or else 0",
    )
    master_addr: str | None = checked(
        None,
        Rule(str, optional=True),
        "address of node 0, where it waits for the other nodes; default: MASTER_ADDR or "
        "LWS_LEADER_ADDRESS of the environment, or else 127.0.0.1",
    )
    master_port: int | None = checked(
        None,
        Rule(int, 1, 65535, optional=True),
        "port at that address; default: MASTER_PORT of the environment, or else 29501",
    )
    cluster_key_file: str | None = checked(
        None,
        Rule(str, optional=True),
        "file with the secret of 32 characters or more that all nodes share, closed to other "
        "users; default: PAGED_CLUSTER_KEY of the environment is the secret",
    )

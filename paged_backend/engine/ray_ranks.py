"""Ranks on other hosts of a cluster of Ray, which starts their nodes.

Ray only places and starts the processes. What they compute, and every message of a step, takes the
same way as with ``paged-backend worker``. This is the only module that imports Ray.
"""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from paged_backend.engine.node_sockets import Context
from paged_backend.engine.remote_ranks import RemoteRanks
from paged_backend.values.errors import ConfigError
from paged_backend.values.log import LOG, log_to_stderr
from paged_backend.values.nodes import Nodes

_THIS_NODE = "ray.io/node-id"  # a label that Ray gives each of its nodes


class RayRanks(RemoteRanks):
    """See :class:`RemoteRanks`; the secret is a new one, which Ray passes on to the nodes.

    Args:
        context: the maker of the socket.
        nodes: all nodes; the address of this one is that in Ray's cluster.
        ranks_per_node: number of ranks of each node.
        uses_gpus: each rank has a GPU; else, each has a core of a CPU.

    Raises:
        ConfigError: this host is in no cluster of Ray, or cannot listen at its address.
    """

    def __init__(
        self, context: Context, nodes: Nodes, ranks_per_node: int, *, uses_gpus: bool
    ) -> None:
        self._key = secrets.token_bytes(32)
        super().__init__(context, nodes, nodes.address, self._key, ranks_per_node)
        resources = {"CPU": float(ranks_per_node)}
        if uses_gpus:
            resources["GPU"] = float(ranks_per_node)
        self._resources = resources
        here = {_THIS_NODE: ray.get_runtime_context().get_node_id()}
        self._group = placement_group(
            [resources] * nodes.number,
            strategy="STRICT_SPREAD",
            bundle_label_selector=[here, *({} for _ in range(1, nodes.number))],
        )
        self._actors: list[Any] = []

    def wait_until_started(self, timeout_s: float) -> None:
        """Start the nodes, and wait until all have joined.

        Raises:
            ConfigError: the cluster does not have as many free hosts, or they take longer.
        """
        if not self._group.wait(timeout_s):
            raise ConfigError(
                f"Ray found no {self._nodes.number} hosts with {self._resources} each within "
                f"{timeout_s:g} s (distributed_timeout_seconds); this host must be one of them"
            )
        for rank in range(1, self._nodes.number):
            actor = ray.remote(_Node).options(
                num_cpus=self._resources["CPU"],
                num_gpus=self._resources.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=rank
                ),
            )
            self._actors.append(actor.remote())
            node = dataclasses.replace(self._nodes, rank=rank)
            self._actors[-1].run.remote(node, self._key)
        super().wait_until_started(timeout_s)

    def close(self) -> None:
        """End all nodes, and give their places back to Ray."""
        super().close()
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)


def join_cluster() -> str:
    """Connect this process with the cluster of this host, and return the host's address there.

    Raises:
        ConfigError: this host is in no cluster of Ray.
    """
    try:
        ray.init(address="auto", ignore_reinit_error=True, log_to_driver=True)
    except ConnectionError as error:
        raise ConfigError(
            "distributed_executor_backend is ray, but this host is in no running cluster of Ray: "
            "`ray start` starts or joins one"
        ) from error
    address = str(ray.util.get_node_ip_address())
    LOG.info("Ray starts the other nodes; the address of this one is %s", address)
    return address


class _Node:
    """A process that Ray starts on another host."""

    def run(self, nodes: Nodes, key: bytes) -> None:
        from paged_backend.engine.node import run_node

        log_to_stderr("info")
        run_node(nodes, key)

"""Groups of GPUs that share one model, and the time of the traffic between them.

A layer that several GPUs divide adds their partial results twice, after attention and after the
MLP. The least that each GPU sends for that is 2 (n - 1) / n of the hidden states (Patarasuk and
Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Each GPU of a
stage sends the hidden states of all tokens to the next stage, and each GPU of the last one sends
the logits to each of the other stages. Stages compute one after another. Latencies are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from paged_backend.checkpoint.stages import Stage, stage_of


@dataclass(frozen=True, slots=True)
class Group:
    """GPUs that share one model.

    Attributes:
        tensor: number of GPUs that divide each layer.
        pipeline: number of stages, each of which has some of the layers.
        gpus_per_node: number of GPUs in a node, which have faster links.
    """

    tensor: int = 1
    pipeline: int = 1
    gpus_per_node: int = 8

    @property
    def num_gpus(self) -> int:
        """The number of GPUs in all stages."""
        return self.tensor * self.pipeline

    @property
    def num_nodes(self) -> int:
        """The number of nodes that they need."""
        return -(-self.num_gpus // self.gpus_per_node)

    def stages(self, num_layers: int) -> Iterator[Stage]:
        """Yield the stages of a model with a number of layers."""
        return (stage_of(num_layers, number, self.pipeline) for number in range(self.pipeline))


@dataclass(frozen=True, slots=True)
class Links:
    """Speeds at which a GPU sends, in bytes per second.

    Attributes:
        node: speed to the GPUs of its node.
        network: speed to GPUs of other nodes.
    """

    node: float
    network: float

    def all_reduce_seconds(self, group: Group, num_bytes: float) -> float:
        """The time to add tensors of `num_bytes` bytes of the GPUs that divide a layer."""
        speed = self.node if group.tensor <= group.gpus_per_node else self.network
        return 2 * (group.tensor - 1) / group.tensor * num_bytes / speed

    def send_seconds(self, group: Group, num_bytes: float) -> float:
        """The time in which each stage but one sends `num_bytes` bytes, one after another."""
        speed = self.node if group.num_nodes == 1 else self.network
        return (group.pipeline - 1) * num_bytes / speed

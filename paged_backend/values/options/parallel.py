"""The processes (ranks) that compute one model together, and several engines of one model."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.values.errors import option_error
from paged_backend.values.validation import Rule, checked

MAX_RANKS = 64


@dataclass(frozen=True, kw_only=True)
class ParallelOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    tensor_parallel_size: int = checked(
        1,
        Rule(int, 1, MAX_RANKS),
        "number of processes (ranks) that divide each layer's weights, and the KV cache, among "
        "them; each rank has its own GPU, or an equal share of the CPU's cores",
    )
    pipeline_parallel_size: int = checked(
        1,
        Rule(int, 1, MAX_RANKS),
        "number of stages, each of which has some of the layers and tensor_parallel_size ranks; "
        "stages compute one after another",
    )
    data_parallel_size: int = checked(
        1,
        Rule(int, 1, MAX_RANKS),
        "number of engines of the model; each has all weights, a separate KV cache, and a share of "
        "the GPUs or of the CPU's cores; a request goes to the engine that most likely has the "
        "request's first tokens in its cache",
    )
    enable_expert_parallel: bool = checked(
        False,
        Rule(bool),
        "each of the ranks of tensor_parallel_size has some experts as a whole, and not a part of "
        "each expert",
    )
    enable_one_shot_all_reduce: bool = checked(
        False,
        Rule(bool),
        "the GPUs of tensor_parallel_size add up results of up to 512 KiB by reading each other's "
        "memory, and larger ones with NCCL; they must be in one host and able to do this. Its "
        "speed has not been measured yet",
    )
    distributed_timeout_seconds: float = checked(
        600.0,
        Rule(float, 1, 86400),
        "how long a rank waits for the others while they load and in a step; the engine ends "
        "beyond it, and is restarted. During steps, step_timeout_s is the shorter limit of a "
        "served engine",
    )
    distributed_executor_backend: str = checked(
        "mp",
        Rule(str, choices=("mp", "ray")),
        "who starts the nodes other than node 0: mp, the operator, with paged-backend worker; "
        "ray, a cluster of Ray in which the server runs",
    )

    @property
    def num_ranks(self) -> int:
        """The number of processes that compute the model together.

        The number of a rank is stage * tensor_parallel_size + its number among those of its stage.
        """
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def check_parallel(self) -> None:
        """Refuse more ranks than are supported, and sums of one rank.

        Raises:
            ConfigError: the message names the option.
        """
        if self.num_ranks > MAX_RANKS:
            raise option_error(
                "pipeline_parallel_size",
                f"times tensor_parallel_size must be at most {MAX_RANKS} ranks; "
                f"got {self.num_ranks}",
            )
        if self.enable_one_shot_all_reduce and self.tensor_parallel_size == 1:
            raise option_error(
                "enable_one_shot_all_reduce",
                "can be true only with a tensor_parallel_size of 2 or more",
            )

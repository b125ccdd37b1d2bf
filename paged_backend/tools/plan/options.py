"""Options of `paged-backend plan`."""

from __future__ import annotations

from dataclasses import dataclass

from paged_backend.tools.plan.number_types import KV_TYPES, WEIGHT_TYPES
from paged_backend.values.errors import ConfigError
from paged_backend.values.validation import Rule, check_fields, checked

_TOKENS = Rule(int, 1, 2**24, optional=True)


def refuse(name: str, problem: str) -> ConfigError:
    """Create the error for an option with an unusable value."""
    return ConfigError(f"--{name.replace('_', '-')}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The inputs of a plan other than the model, the GPUs and the engine's options.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    dtype: str = checked(
        "auto",
        Rule(str, choices=("auto", *WEIGHT_TYPES)),
        "of the weights; auto: the checkpoint's",
    )
    kv_cache_dtype: str = checked(
        "auto", Rule(str, choices=("auto", *KV_TYPES)), "of keys and values; auto: the layers'"
    )
    context: int | None = checked(
        None,
        Rule(int, 2, 2**24, optional=True),
        "tokens of prompt and output that a request may have; default: the model's",
    )
    sequences: int = checked(
        1, Rule(int, 1, 2**20), "how many of the whole context must fit at once"
    )
    tensor_parallel_size: int | None = checked(
        None,
        Rule(int, 1, 64, optional=True),
        "GPUs that divide each layer; default: as few as hold the model and the sequences",
    )
    pipeline_parallel_size: int | None = checked(
        None,
        Rule(int, 1, 64, optional=True),
        "stages of layers; default: 1, or one for each of --nodes",
    )
    nodes: int | None = checked(
        None, Rule(int, 1, 64, optional=True), "hosts to use at most; default: as many as needed"
    )
    gpus_per_node: int = checked(8, Rule(int, 1, 128), "GPUs of a host")
    link_gb_s: float | None = checked(
        None,
        Rule(float, 0.1, 1e5, optional=True),
        "10^9 bytes a second that a GPU sends to others of its host; default: by data sheet",
    )
    network_gb_s: float = checked(
        50.0, Rule(float, 0.1, 1e5), "10^9 bytes a second that a GPU sends to other hosts"
    )
    input_len: int | None = checked(
        None, _TOKENS, "mean tokens of a prompt; default: 1024, or 3/4 of a shorter context"
    )
    output_len: int | None = checked(
        None, _TOKENS, "mean tokens of an output; default: 256, or 1/4 of a shorter context"
    )
    length_sigma: float = checked(
        1.0, Rule(float, 0, 3), "sigma of both log-normal lengths; 0 makes all requests alike"
    )

    def __post_init__(self) -> None:
        check_fields(self, refuse)

    def context_of(self, longest: int, default: int) -> int:
        """The context length to plan for.

        Args:
            longest: tokens that the model was made for.
            default: tokens if the option is not set.
        """
        if self.context is not None and self.context > longest:
            raise refuse("context", f"the model was made for {longest} tokens, got {self.context}")
        return self.context or default

    def mean_lengths(self, context: int) -> tuple[int, int]:
        """The mean lengths of prompts and outputs, in tokens."""
        prompt = self.input_len or max(1, min(1024, context * 3 // 4))
        output = self.output_len or max(1, min(256, context // 4))
        if prompt + output > context:
            raise refuse(
                "input_len",
                f"{prompt} and an output of {output} tokens exceed the context of {context}",
            )
        return prompt, output

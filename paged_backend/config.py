"""The engine's options: each default, range and sentence of help is written here, once.

The command line, ``1/model.json`` and :class:`paged_backend.LLM` all read these fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paged_backend.errors import ConfigError
from paged_backend.log import LEVELS
from paged_backend.validation import (
    Rule,
    check_fields,
    checked,
    from_mapping,
    from_string,
    shorten,
)

MIB = 2**20
_METRICS_PREFIX = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,63}")
DTYPES = ("auto", "float32", "bfloat16", "float16")
MAX_TENANT_WEIGHTS = 4096
_TENANT_NAME_LENGTH = 256
_WEIGHT = Rule(float, 1e-6, 1e6)


def refuse(name: str, problem: str) -> ConfigError:
    """The error for an option that cannot be used."""
    return ConfigError(f"option {name} {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How much a step may hold, and whether the next is planned before it is over."""

    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool


# Where the options leave them open.
CPU_LIMITS = StepLimits(max_num_seqs=64, max_num_batched_tokens=512, async_scheduling=False)
GPU_LIMITS = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192, async_scheduling=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine; names are vLLM's where vLLM has the option.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    model: str = checked(
        "demo", Rule(str), "folder or Hugging Face id of the checkpoint; demo is the bundled model"
    )
    tokenizer: str | None = checked(
        None, Rule(str, optional=True), "folder or id of the tokenizer; default: the model's"
    )
    device: str = checked(
        "auto", Rule(str, choices=("auto", "cpu", "cuda")), "auto uses a GPU if there is one"
    )
    dtype: str = checked(
        "auto", Rule(str, choices=DTYPES), "auto: float32 on a CPU, the checkpoint's on a GPU"
    )
    load_format: str = checked(
        "auto", Rule(str, choices=("auto", "dummy")), "dummy makes random weights"
    )
    quantization: str | None = checked(
        None,
        Rule(str, max_length=64, optional=True),
        "number format of linear layers, by the name under which it was registered; default: dtype",
    )
    seed: int = checked(
        0, Rule(int, 0, 2**63 - 1), "seed of requests without one, and of dummy weights"
    )
    max_model_len: int | None = checked(
        None,
        Rule(int, 2, 2**24, optional=True),
        "maximum number of tokens of prompt and output; default: the model's",
    )
    max_num_seqs: int | None = checked(
        None,
        Rule(int, 1, 4096, optional=True),
        "maximum number of running sequences; default: 64 on a CPU, 256 on a GPU",
    )
    max_num_batched_tokens: int | None = checked(
        None,
        Rule(int, 1, 2**20, optional=True),
        "maximum number of tokens per step, longer prompts are cut into chunks; default: 512 on a "
        "CPU, 8192 on a GPU",
    )
    block_size: int = checked(16, Rule(int, 8, 256), "tokens in a KV block, a power of two")
    gpu_memory_utilization: float = checked(
        0.9, Rule(float, high=1, above=0), "fraction of the GPU's memory for weights and KV blocks"
    )
    kv_cache_memory_bytes: int | None = checked(
        None,
        Rule(int, 1, 2**48, optional=True),
        "bytes for KV blocks; default: 512 MiB on a CPU, the free memory on a GPU",
    )
    enable_prefix_caching: bool = checked(True, Rule(bool), "reuse the KV blocks of equal prefixes")
    enable_chunked_prefill: bool = checked(True, Rule(bool), "cut long prompts into chunks")
    async_scheduling: bool | None = checked(
        None,
        Rule(bool, optional=True),
        "schedule the next step while the device computes; only on a GPU, where it is the default",
    )
    enforce_eager: bool = checked(
        False, Rule(bool), "launch the kernels of a decode step one by one instead of a CUDA graph"
    )

    scheduling_policy: str = checked(
        "fair",
        Rule(str, choices=("fair", "priority")),
        "order of waiting requests: the lowest `priority` first, then, if fair, the `tenant` that "
        "was served least, then the earliest",
    )
    tenant_weights: str = checked(
        "", Rule(str), "shares of tenants, for example gold=4,free=0.5; other tenants have 1"
    )
    max_tenant_request_rate: float | None = checked(
        None,
        Rule(float, 1e-3, 1e6, optional=True),
        "accepted requests per second of one tenant, with bursts of up to two seconds' worth",
    )
    max_waiting_requests: int = checked(
        1024,
        Rule(int, 1, 2**20),
        "maximum number of waiting requests; more are refused with queue_full",
    )
    max_waiting_tokens: int = checked(
        2**20,
        Rule(int, 1, 2**40),
        "maximum number of tokens of all waiting requests; more are refused with queue_full",
    )
    max_prompt_tokens: int | None = checked(
        None,
        Rule(int, 1, 2**24, optional=True),
        "maximum number of prompt tokens; default: max_model_len - 1",
    )
    max_output_tokens: int | None = checked(
        None,
        Rule(int, 1, 2**24, optional=True),
        "maximum value of max_tokens; default: max_model_len",
    )
    max_n: int = checked(64, Rule(int, 1, 64), "maximum value of n")
    max_stop_strings: int = checked(16, Rule(int, 0, 16), "maximum number of stop strings")
    max_stop_length: int = checked(256, Rule(int, 1, 256), "maximum characters per stop string")
    max_logit_bias: int = checked(
        1024, Rule(int, 0, 1024), "maximum number of entries of logit_bias"
    )
    max_json_length: int = checked(
        2**20, Rule(int, 2, 2**24), "maximum characters of sampling_parameters"
    )
    max_json_depth: int = checked(
        32, Rule(int, 1, 256), "maximum nesting of sampling_parameters and messages"
    )
    max_total_logprobs: int = checked(
        2**15,
        Rule(int, 1, 2**31 - 1),
        "maximum number of log-probabilities of a request: for each token of its completions, "
        "and of its prompt if requested, one and those of the most likely tokens",
    )
    max_pass_through_length: int = checked(
        4096,
        Rule(int, 0, 2**24),
        "maximum bytes of pass_through, which is returned with each response of a stream",
    )

    step_timeout_s: float = checked(
        60.0,
        Rule(float, 2, 86400),
        "an engine whose step takes longer is considered hung: it is killed and restarted",
    )
    engine_restart_timeout_s: float = checked(
        120.0,
        Rule(float, 0, 86400),
        "how long requests wait for an engine to restart; with 0 it is not restarted, and its "
        "requests fail",
    )
    max_crashes_per_request: int = checked(
        3,
        Rule(int, 1, 1000),
        "a request fails if it was in flight when this number of engines died, as it may be the "
        "cause",
    )
    drain_timeout_s: float = checked(
        20.0,
        Rule(float, 0, 86400),
        "how long running requests may continue when the server stops, within its exit timeout",
    )

    enable_inspect: bool = checked(
        False,
        Rule(bool),
        "answer the task `inspect`, which shows the sequences and blocks of all clients, for "
        "`paged-backend top`; each answer takes time of the engine",
    )
    log_level: str = checked(
        "info",
        Rule(str, choices=LEVELS),
        "least important level that is logged; debug adds a line for each canceled call",
    )
    metrics_prefix: str = checked(
        "paged_", Rule(str), "prefix of the metrics' names; vLLM's is vllm:"
    )

    def __post_init__(self) -> None:
        check_fields(self, refuse)
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise refuse(
                "metrics_prefix",
                "must have up to 64 letters, digits, '_' and ':', not a digit first, "
                f"got {shorten(self.metrics_prefix)}",
            )
        self.weights_of_tenants()
        if self.block_size & (self.block_size - 1):
            raise refuse(
                "block_size", f"must be a power of two from 8 to 256, got {self.block_size}"
            )
        seqs, tokens = self.max_num_seqs, self.max_num_batched_tokens
        if seqs is not None and tokens is not None and tokens < seqs:
            raise refuse(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({seqs}), so that each running sequence can "
                f"decode in each step; got {tokens}",
            )

    def weights_of_tenants(self) -> dict[str, float]:
        """The weights in ``tenant_weights``, by tenant.

        Raises:
            ConfigError: they cannot be read.
        """
        entries = self.tenant_weights.split(",") if self.tenant_weights else []
        weights = dict(_tenant_weight(entry) for entry in entries)
        if len(weights) < len(entries) or len(weights) > MAX_TENANT_WEIGHTS:
            raise refuse(
                "tenant_weights",
                f"must name up to {MAX_TENANT_WEIGHTS} tenants, each once, "
                f"got {len(entries)} entries for {len(weights)} tenants",
            )
        return weights

    def step_limits(self, defaults: StepLimits) -> StepLimits:
        """The options that bound a step; a platform's `defaults` where they are left open."""
        tokens = self.max_num_batched_tokens or defaults.max_num_batched_tokens
        seqs = self.max_num_seqs or min(defaults.max_num_seqs, tokens)
        chosen = self.async_scheduling
        return StepLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(tokens, seqs),
            async_scheduling=defaults.async_scheduling if chosen is None else chosen,
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from names and values of unknown origin.

        Raises:
            ConfigError: a name is unknown or a value is not allowed.
        """
        return from_mapping(cls, values, refuse)


def _tenant_weight(entry: str) -> tuple[str, float]:
    name, _, number = entry.rpartition("=")
    name, weight = name.strip(), from_string(float, number)
    if not 0 < len(name) <= _TENANT_NAME_LENGTH or not _WEIGHT.accepts(weight):
        raise refuse(
            "tenant_weights",
            f"must be tenant=weight, tenant=weight, ... with names of 1 to {_TENANT_NAME_LENGTH} "
            f"characters and weights from 1e-06 up to 1000000, got {shorten(entry)}",
        )
    return name, weight


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ConfigError: the file is missing, unreadable, or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a JSON object, got {shorten(values)}")
    return values

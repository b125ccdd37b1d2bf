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
from paged_backend.validation import Rule, check_fields, checked, from_mapping, shorten

MIB = 2**20
_METRICS_PREFIX = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]{0,63}")
DTYPES = ("auto", "float32", "bfloat16", "float16")


def refuse(name: str, problem: str) -> ConfigError:
    """The error for an option that cannot be used."""
    return ConfigError(f"option {name} {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How much a step may hold, and whether the next is planned before it is over."""

    max_num_seqs: int
    max_num_batched_tokens: int
    async_scheduling: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Options of one engine; names are vLLM's where vLLM has the option.

    Raises:
        ConfigError: an option has the wrong type or lies outside its range.
    """

    model: str = checked(
        "demo", Rule(str), "folder or Hugging Face id of the checkpoint; demo is the bundled one"
    )
    tokenizer: str | None = checked(
        None, Rule(str, optional=True), "folder or id of the tokenizer; default: the model's"
    )
    device: str = checked(
        "auto", Rule(str, choices=("auto", "cpu", "cuda")), "auto takes a GPU where there is one"
    )
    dtype: str = checked(
        "auto", Rule(str, choices=DTYPES), "auto: float32 on a CPU, the checkpoint's on a GPU"
    )
    load_format: str = checked(
        "auto", Rule(str, choices=("auto", "dummy")), "dummy makes random weights"
    )
    seed: int = checked(
        0, Rule(int, 0, 2**63 - 1), "seed of requests without one, and of dummy weights"
    )
    max_model_len: int | None = checked(
        None,
        Rule(int, 2, 2**24, optional=True),
        "tokens of prompt and output; default: the model's",
    )
    max_num_seqs: int | None = checked(
        None,
        Rule(int, 1, 4096, optional=True),
        "sequences that run at once; default: 64 on a CPU, 256 on a GPU",
    )
    max_num_batched_tokens: int | None = checked(
        None,
        Rule(int, 1, 2**20, optional=True),
        "tokens computed in one step, longer prompts are cut into chunks; default: 512 on a CPU, "
        "8192 on a GPU",
    )
    block_size: int = checked(16, Rule(int, 8, 256), "tokens in a KV block, a power of two")
    gpu_memory_utilization: float = checked(
        0.9, Rule(float, high=1, above=0), "part of the GPU's memory for weights and KV blocks"
    )
    kv_cache_memory_bytes: int | None = checked(
        None,
        Rule(int, 1, 2**48, optional=True),
        "bytes for KV blocks; default: 512 MiB on a CPU, what is free on a GPU",
    )
    enable_prefix_caching: bool = checked(True, Rule(bool), "reuse blocks of equal prefixes")
    enable_chunked_prefill: bool = checked(True, Rule(bool), "cut long prompts into chunks")
    async_scheduling: bool | None = checked(
        None,
        Rule(bool, optional=True),
        "plan the next step while the device computes; default: on a GPU",
    )
    enforce_eager: bool = checked(
        False, Rule(bool), "launch each kernel of a decode step instead of a CUDA graph"
    )

    enable_inspect: bool = checked(
        False,
        Rule(bool),
        "answer the task `inspect`, which shows the sequences and blocks of all callers, for "
        "`paged-backend top`; each look takes the engine's time",
    )
    metrics_prefix: str = checked(
        "paged_", Rule(str), "what the names of the metrics begin with; vLLM's have vllm:"
    )

    def __post_init__(self) -> None:
        check_fields(self, refuse)
        if not _METRICS_PREFIX.fullmatch(self.metrics_prefix):
            raise refuse(
                "metrics_prefix",
                "must have up to 64 letters, digits, '_' and ':', not a digit first, "
                f"got {shorten(self.metrics_prefix)}",
            )
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

    def step_limits(self, *, on_gpu: bool) -> StepLimits:
        """The options that bound a step, with the defaults of the device it runs on."""
        seqs, tokens = (256, 8192) if on_gpu else (64, 512)
        seqs = self.max_num_seqs or min(seqs, self.max_num_batched_tokens or tokens)
        return StepLimits(
            max_num_seqs=seqs,
            max_num_batched_tokens=self.max_num_batched_tokens or max(tokens, seqs),
            async_scheduling=on_gpu if self.async_scheduling is None else self.async_scheduling,
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> EngineConfig:
        """Build from names and values of unknown origin.

        Raises:
            ConfigError: a name is unknown or a value is not allowed.
        """
        return from_mapping(cls, values, refuse)


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

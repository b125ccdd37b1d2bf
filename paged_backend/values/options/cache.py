"""The KV cache: its memory and its blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paged_backend.values.errors import option_error
from paged_backend.values.options.kv_events import OPTION, KVEventsConfig, describe_fields
from paged_backend.values.validation import Rule, checked

KV_CACHE_DTYPES = (
    "auto",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_per_token_head",
    "int8_per_token_head",
)

ALL = "all"
"""The value of `mamba_cache_mode` for states after every block."""

CPU_KV_CACHE_BYTES = 512 * 2**20
"""The size of the KV pool on a CPU where the options leave it open."""


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """See :class:`paged_backend.values.config.EngineConfig`."""

    block_size: int = checked(16, Rule(int, 8, 256), "tokens in a KV block, a power of two")
    gpu_memory_utilization: float = checked(
        0.9, Rule(float, high=1, above=0), "fraction of the GPU's memory for weights and KV blocks"
    )
    kv_cache_memory_bytes: int | None = checked(
        None,
        Rule(int, 1, 2**48, optional=True),
        "bytes for KV blocks; default: 512 MiB on a CPU, the free memory on a GPU",
    )
    kv_cache_dtype: str = checked(
        "auto",
        Rule(str, choices=KV_CACHE_DTYPES),
        "how keys and values are stored; auto: as the checkpoint says, else in the model's dtype; "
        "fp8 uses the checkpoint's scales, or else a scale per token and head",
    )
    enable_prefix_caching: bool = checked(True, Rule(bool), "reuse the KV blocks of equal prefixes")
    prefix_cache_key_file: str | None = checked(
        None,
        Rule(str, optional=True),
        "file with the secret key of the prefix cache's hashes, which is written if it is missing; "
        "engines with the same key name equal blocks alike in their KV events, as Dynamo's router "
        "needs; default: a random key",
    )
    mamba_cache_mode: str = checked(
        "align",
        Rule(str, choices=("none", "align", ALL)),
        "which states of sequences the prefix cache keeps, for models with layers that keep a "
        "state per sequence; align: after every mamba_block_size tokens, at the end of prompts and "
        "where a prompt leaves an earlier one, "
        "all: after every KV block, none: no states, and so no prefix is found; on a GPU in 16 "
        "bits, states are kept after multiples of 64 tokens only",
    )
    mamba_block_size: int = checked(
        512,
        Rule(int, 8, 2**20),
        "tokens between two states that the prefix cache keeps, a multiple of block_size",
    )
    kv_events_config: dict[str, Any] | None = checked(
        None,
        Rule(dict, optional=True),
        "publish which blocks the prefix cache holds, for routers, as JSON, such as "
        '{"enable_kv_cache_events": true}; its fields are ' + describe_fields(),
    )

    def check_cache(self) -> None:
        """Check what a `Rule` cannot express.

        Raises:
            ConfigError: ``block_size`` is not a power of two, ``mamba_block_size`` not a multiple
                of it, a field of ``kv_events_config`` is
                not allowed, or events are on while the prefix cache is off.
        """
        if self.block_size & (self.block_size - 1):
            raise option_error(
                "block_size", f"must be a power of two from 8 to 256, got {self.block_size}"
            )
        if self.mamba_block_size % self.block_size:
            raise option_error(
                "mamba_block_size",
                f"must be a multiple of block_size ({self.block_size}), got "
                f"{self.mamba_block_size}",
            )
        if self.kv_events().is_on and not self.enable_prefix_caching:
            raise option_error(OPTION, "needs enable_prefix_caching")

    @property
    def state_interval(self) -> int:
        """Tokens between two states that the prefix cache keeps; 0 if it keeps none."""
        by_mode = {"none": 0, ALL: self.block_size}
        return by_mode.get(self.mamba_cache_mode, self.mamba_block_size)

    def kv_events(self) -> KVEventsConfig:
        """Return the fields of ``kv_events_config``.

        Raises:
            ConfigError: one of them is not allowed.
        """
        return KVEventsConfig.read(self.kv_events_config)

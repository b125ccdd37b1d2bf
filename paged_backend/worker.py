"""One model on one device: its weights, a KV pool of the right size, and what carries out steps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paged_backend.config import MIB, EngineConfig
from paged_backend.core.scheduler_output import SchedulerOutput
from paged_backend.errors import ConfigError
from paged_backend.models.devices import kernels_run_on
from paged_backend.models.loader import load_model
from paged_backend.runner.attention import (
    AttentionBackend,
    AttentionConfig,
    make_attention_backend,
)
from paged_backend.runner.host_step import HostStepRunner
from paged_backend.runner.kv_cache import KVCacheSpec
from paged_backend.runner.step import PendingOutput, StepRunner

if TYPE_CHECKING:
    from paged_backend.runner.device_step import DeviceStepRunner

DEFAULT_CPU_KV_CACHE_BYTES = 512 * MIB


class ModelRunner:
    """The model and its KV pool; used by the engine's thread only.

    Raises:
        ConfigError: the checkpoint cannot be loaded or the pool cannot hold one longest request.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self.device = resolve_device(config.device)
        self._config = config
        self.step_limits = config.step_limits(on_gpu=kernels_run_on(self.device))
        self._model = load_model(config, folder, self.device)
        shape = self._model.config
        self._spec = KVCacheSpec(
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_size=config.block_size,
            dtype=self._model.dtype,
        )
        self.vocab_size = shape.vocab_size
        self.max_model_len = self._model.max_model_len
        self._check_whole_prompts_fit(config)
        self.eos_token_ids = frozenset(shape.eos_token_ids)
        self.num_blocks = self._num_blocks(config)
        self._steps = self._make_steps()

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Start a planned step."""
        return self._steps.submit(plan)

    @property
    def model_seconds(self) -> float | None:
        """Spent in forward passes so far; None where the host does not wait for them."""
        return self._steps.model_seconds if isinstance(self._steps, HostStepRunner) else None

    def _make_steps(self) -> StepRunner:
        if not kernels_run_on(self.device):
            attention = self._make_attention(self.num_blocks)
            return HostStepRunner(self._model, attention, self._config.block_size)
        steps = self._make_device_steps(self.num_blocks)
        if self.device.type == "cuda":  # an interpreter compiles nothing
            steps.warm_up()
            if not self._config.enforce_eager:
                steps.capture()
            # Captures empty the caching allocator, and a pool of a given size was never tried
            # beside the largest step: prompts should neither wait for memory nor lack it.
            steps.run_largest()
        return steps

    def _make_device_steps(self, num_blocks: int) -> DeviceStepRunner:
        # Imported here because Triton exists only where there is a GPU or its interpreter.
        from paged_backend.runner.device_step import DeviceStepRunner

        return DeviceStepRunner(
            self._model,
            self._make_attention(num_blocks),
            self._config.block_size,
            self.step_limits.max_num_seqs,
            self.step_limits.max_num_batched_tokens,
        )

    def _make_attention(self, num_blocks: int) -> AttentionBackend:
        shape = self._model.config
        return make_attention_backend(
            self._spec,
            AttentionConfig(num_heads=shape.num_heads, scale=shape.head_dim**-0.5),
            num_blocks,
            self.device,
        )

    def _check_whole_prompts_fit(self, config: EngineConfig) -> None:
        limit = self.step_limits.max_num_batched_tokens
        if not config.enable_chunked_prefill and limit < self.max_model_len:
            raise ConfigError(
                f"option max_num_batched_tokens must be at least max_model_len "
                f"({self.max_model_len}) without chunked prefill, got {limit}"
            )

    def _num_blocks(self, config: EngineConfig) -> int:
        budget = config.kv_cache_memory_bytes or self._free_memory(config)
        num_blocks = self._spec.num_blocks(budget)
        longest = -(-self.max_model_len // config.block_size)
        if num_blocks < longest + 1:  # one is the null block
            raise ConfigError(
                f"option kv_cache_memory_bytes: {budget} bytes hold {num_blocks} blocks, but one "
                f"request of max_model_len ({self.max_model_len}) needs {longest + 1}; give "
                f"{(longest + 1) * self._spec.bytes_per_block} bytes or more, or lower "
                f"max_model_len"
            )
        return num_blocks

    def _free_memory(self, config: EngineConfig) -> int:
        """Bytes for the pool where the option leaves them open."""
        if self.device.type == "cpu":
            return DEFAULT_CPU_KV_CACHE_BYTES
        peak = self._peak_of_largest_step()
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, int(free - peak - (1 - config.gpu_memory_utilization) * total))

    def _peak_of_largest_step(self) -> int:
        """Bytes that steps take besides weights and pool, measured on a pool of the null block.

        Graphs keep their memory apart from that of other steps, but take no more than these.
        """
        before = torch.cuda.memory_allocated(self.device)
        steps = self._make_device_steps(num_blocks=1)
        torch.cuda.reset_peak_memory_stats(self.device)
        steps.run_largest()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        del steps
        torch.cuda.empty_cache()
        return peak if self._config.enforce_eager else 2 * peak


def resolve_device(option: str) -> torch.device:
    """The device that an option names.

    Raises:
        ConfigError: a GPU is asked for and there is none.
    """
    if option == "cuda" and not torch.cuda.is_available():
        raise ConfigError("option device is cuda, but torch finds no NVIDIA device here")
    if option == "auto":
        option = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(option)

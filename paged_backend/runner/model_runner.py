"""Runs planned steps on one device: weights, KV pool, forward pass and sampling."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from paged_backend.config import MIB, EngineConfig
from paged_backend.core.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paged_backend.errors import ConfigError
from paged_backend.models.loader import load_model
from paged_backend.runner.attention import AttentionConfig, make_attention_backend
from paged_backend.runner.input_batch import InputBatch
from paged_backend.runner.kv_cache import KVCacheSpec
from paged_backend.runner.sampler import Sampler
from paged_backend.runner.torch_threads import one_torch_thread

DEFAULT_CPU_KV_CACHE_BYTES = 512 * MIB


class ModelRunner:
    """The model and its KV pool; used by the engine's thread only.

    Raises:
        ConfigError: the checkpoint cannot be loaded or the pool cannot hold one longest request.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self.device = resolve_device(config.device)
        self._block_size = config.block_size
        self._model = load_model(config, folder, self.device)
        shape = self._model.config
        spec = KVCacheSpec(
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
        self.num_blocks = self._num_blocks(config, spec)
        self._attention = make_attention_backend(
            spec,
            AttentionConfig(num_heads=shape.num_heads, scale=shape.head_dim**-0.5),
            self.num_blocks,
            self.device,
        )
        self._sampler = Sampler(self.eos_token_ids)
        self.model_seconds = 0.0  # spent in forward passes so far

    @torch.inference_mode()
    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Make the plan's copies, compute its tokens and sample."""
        with one_torch_thread(self.device):
            return self._execute(plan)

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        batch = InputBatch.build(plan, self._block_size, self.device)
        if plan.block_copies:
            self._attention.copy_blocks(plan.block_copies)
        started = time.perf_counter()
        logits = self._model.forward(
            batch.input_ids, self._attention, batch.attention, batch.logits_indices
        )
        self.model_seconds += time.perf_counter() - started
        return ModelRunnerOutput(self._sampler.sample(logits, batch.samples))

    def _check_whole_prompts_fit(self, config: EngineConfig) -> None:
        limit = config.max_num_batched_tokens
        if not config.enable_chunked_prefill and limit < self.max_model_len:
            raise ConfigError(
                f"option max_num_batched_tokens must be at least max_model_len "
                f"({self.max_model_len}) without chunked prefill, got {limit}"
            )

    def _num_blocks(self, config: EngineConfig, spec: KVCacheSpec) -> int:
        budget = config.kv_cache_memory_bytes or self._free_memory(config)
        num_blocks = spec.num_blocks(budget)
        longest = -(-self.max_model_len // config.block_size)
        if num_blocks < longest + 1:  # one is the null block
            raise ConfigError(
                f"option kv_cache_memory_bytes: {budget} bytes hold {num_blocks} blocks, but one "
                f"request of max_model_len ({self.max_model_len}) needs {longest + 1}; give "
                f"{(longest + 1) * spec.bytes_per_block} bytes or more, or lower max_model_len"
            )
        return num_blocks

    def _free_memory(self, config: EngineConfig) -> int:
        """Bytes for the pool where the option leaves them open."""
        if self.device.type == "cpu":
            return DEFAULT_CPU_KV_CACHE_BYTES
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, int(free - (1 - config.gpu_memory_utilization) * total))


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

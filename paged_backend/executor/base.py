"""The interface between the engine and whatever runs its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paged_backend.core.scheduler_output import LaunchedStep, SchedulerOutput
from paged_backend.options.scheduling import StepLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Limits, sizes, device and startup times of a worker that is ready to run steps."""

    step_limits: StepLimits
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int  # includes the null block
    block_size: int
    device: str
    dtype: str
    quantization: str | None  # of the weights
    kv_cache: str  # the format of keys and values
    kv_bytes_per_token: int  # in all layers, with the scales of quantized numbers
    attention_backend: str
    num_graphs: int  # captured CUDA graphs
    supports_drafts: bool  # a step can sample several tokens of a sequence
    kernels_s: float  # to import the platform's kernels, and to compile them if necessary
    weights_s: float  # to load the weights
    prepare_s: float  # to size the KV pool and, on a GPU, to compile kernels and capture graphs

    def describe(self) -> str:
        """One line for a log."""
        num_tokens = (self.num_blocks - 1) * self.block_size
        graphs = f", {self.num_graphs} CUDA graphs" if self.num_graphs else ""
        weights = f" with {self.quantization} weights" if self.quantization else ""
        return (
            f"{self.dtype}{weights} on {self.device} with {self.attention_backend}, "
            f"{self.num_blocks - 1} KV blocks in {self.kv_cache} for {num_tokens} tokens{graphs}; "
            f"loaded in {self.kernels_s + self.weights_s + self.prepare_s:.1f} s: kernels "
            f"{self.kernels_s:.1f} s, weights {self.weights_s:.1f} s, KV pool and graphs "
            f"{self.prepare_s:.1f} s"
        )


class Executor(Protocol):
    """Runs steps. :class:`paged_backend.worker.Worker` runs them in the engine's process."""

    @property
    def info(self) -> WorkerInfo:
        """Properties of the loaded model and its worker."""
        ...

    def launch(self, output: SchedulerOutput) -> LaunchedStep:
        """Start the forward pass of a step; steps are carried out in the order of their launch."""
        ...

"""The interface between the engine and whatever runs its steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from paged_backend.core.scheduler_output import DraftGuide, LaunchedStep, SchedulerOutput
from paged_backend.values.kv_cache_groups import KVCacheLayout
from paged_backend.values.options.cpu import HIGHEST
from paged_backend.values.options.scheduling import StepLimits
from paged_backend.values.pooling_params import Pooling
from paged_backend.values.sampling_defaults import SamplingDefaults


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo:
    """Limits, sizes, device and startup times of a worker that is ready to run steps."""

    step_limits: StepLimits
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    num_blocks: int  # includes the null block
    kv_layout: KVCacheLayout
    device: str
    dtype: str
    float32_matmul_precision: str
    quantization: str | None  # quantization method of the weights
    weight_forms: Mapping[str, int]  # the number of quantized layers by the form they are kept in
    num_ranks: int  # workers that compute the model together
    weight_bytes: int  # size of all tensors that the model of a worker holds
    kv_cache: str  # the format of keys and values; empty without a KV cache
    kv_bytes_per_token: int  # in all layers of a worker, with the scales of quantized numbers
    attention_backend: str
    num_graphs: int  # captured CUDA graphs
    pooling: Pooling | None  # how the model makes embeddings; None if it generates
    hidden_size: int
    scores_pairs: bool  # the model is a reranker: what is pooled becomes a score
    sampling_defaults: SamplingDefaults  # none for a model that does not generate
    kernels_s: float  # to import the platform's kernels, and to compile them if necessary
    weights_s: float  # to load the weights
    prepare_s: float  # to size the KV pool and, on a GPU, to compile kernels and capture graphs

    def describe(self) -> str:
        """One line for a log."""
        graphs = f", {self.num_graphs} CUDA graphs" if self.num_graphs else ""
        task = ""
        if self.pooling is not None:
            normalized = ", normalized" if self.pooling.normalize else ""
            task = f"embeddings of {self.hidden_size} numbers ({self.pooling.kind}{normalized}) in "
        if self.scores_pairs:
            task = "scores of pairs of texts in "
        cache = "no KV cache"
        if self.kv_cache:
            cache = f"{self.num_blocks - 1} KV blocks in {self.kv_cache} for {self._capacity}"
        elif self.kv_layout.states is not None:
            cache = f"{self.kv_layout.states.num_slots - 1} slots for states of sequences"
        ranks = f" of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return (
            f"{task}{self.number_format}{self._weights()} on {self.device}{ranks} "
            f"with {self.attention_backend}, {cache}{graphs}; "
            f"loaded in {self.kernels_s + self.weights_s + self.prepare_s:.1f} s: "
            f"kernels {self.kernels_s:.1f} s, weights {self.weights_s:.1f} s, KV pool "
            f"and graphs {self.prepare_s:.1f} s"
        )

    @property
    def number_format(self) -> str:
        """The dtype, and the precision of float32 products if it is not the highest."""
        if self.float32_matmul_precision == HIGHEST:
            return self.dtype
        return f"{self.dtype} (matmul precision {self.float32_matmul_precision})"

    def _weights(self) -> str:
        size = f"{self.weight_bytes / 2**20:,.0f} MiB"
        if self.quantization is None:
            return f" with {size} of weights"
        forms = ", ".join(f"{count} layers {form}" for form, count in self.weight_forms.items())
        return f" with {size} of {self.quantization} weights ({forms or 'no layer'})"

    @property
    def _capacity(self) -> str:
        """The tokens or sequences that fit in the KV blocks."""
        layout, num_blocks = self.kv_layout, self.num_blocks - 1
        if not any(layout.sliding):
            return f"{num_blocks * layout.block_size} tokens"
        windows = ", ".join(str(window or "none") for window in layout.windows)
        number = layout.num_sequences(num_blocks, self.max_model_len)
        return f"{number} x {self.max_model_len} tokens (windows of KV cache groups: {windows})"


class ReadAdapter(Protocol):
    """A LoRA adapter that was read and checked."""

    @property
    def digest(self) -> str:
        """The digest of its weights."""
        ...


class AdapterStore(Protocol):
    """The LoRA adapters that a model holds, by the digests of their weights."""

    def read(self, folder: Path) -> ReadAdapter:
        """Read and check an adapter, on any thread.

        Raises:
            ConfigError: the adapter cannot be used with the model.
        """
        ...

    def put(self, adapter: object) -> None:
        """Let the model hold an adapter that `read` has returned, from the next step on."""
        ...

    def drop(self, digest: str) -> None:
        """Let the model forget an adapter that no sequence has."""
        ...


class Executor(Protocol):
    """Runs steps. :class:`paged_backend.engine.worker.Worker` runs them in the engine's process."""

    @property
    def info(self) -> WorkerInfo:
        """Properties of the loaded model and its worker."""
        ...

    @property
    def adapters(self) -> AdapterStore | None:
        """The LoRA adapters; None for a model without any."""
        ...

    def check(self) -> None:
        """Raise EngineDead if a process that computes steps has ended."""
        ...

    def launch(self, output: SchedulerOutput, guide: DraftGuide | None = None) -> LaunchedStep:
        """Start the forward pass of a step; steps are carried out in the order of their launch.

        Args:
            output: the step.
            guide: the tokens that the worker's draft model may draw. It may be ignored, because
                guesses change no token.
        """
        ...

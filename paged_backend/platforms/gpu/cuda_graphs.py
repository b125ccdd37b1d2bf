"""Captures steps as CUDA graphs: one launch per step instead of one per kernel."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

Replay = Callable[[], Tensor]
"""Launches a captured step. It always returns the same tensor, with new contents."""

CHUNKS = (
    16,
    32,
    64,
    128,
    256,
)  # tokens; a longer chunk takes more time to compute than to launch


@dataclass(frozen=True, slots=True)
class StepShape:
    """The number of elements of each buffer that a step uses."""

    num_tokens: int
    num_seqs: int
    num_samples: int
    num_decodes: int
    num_prompt_rows: int = 0  # rows whose logits are needed for prompt logprobs

    @classmethod
    def decodes(cls, count: int) -> StepShape:
        """Return the shape of a step of sequences with one token and one sample each."""
        return cls(count, count, count, count)

    @classmethod
    def chunk(cls, num_tokens: int) -> StepShape:
        """Return the shape of a step with the last `num_tokens` tokens of one prompt."""
        return cls(num_tokens, 1, 1, 0)


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, 8, then multiples of 16 with growing gaps.

    A batch is padded to the next size, so the gaps limit the cost of padding. ``max_num_seqs`` is
    always included.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, 513, 64), *range(1024, 4097, 512)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def captured_shapes(max_num_seqs: int, max_num_batched_tokens: int) -> list[StepShape]:
    """Return the step shapes to capture: batches of decodes, and short chunks of one prompt.

    Short chunks occur when a prefix hit covers most of a prompt.
    """
    chunks = [size for size in CHUNKS if size <= max_num_batched_tokens]
    decodes = map(StepShape.decodes, decode_sizes(max_num_seqs))
    return [*decodes, *map(StepShape.chunk, chunks)]


class StepGraphs:
    """Captured steps; a step is padded to a captured shape if one fits.

    Args:
        shapes: the shapes to capture.
        capture: captures a step of a shape.
    """

    def __init__(self, shapes: Iterable[StepShape], capture: Callable[[StepShape], Replay]) -> None:
        # Largest first, so that the others reuse its memory.
        ordered = sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)
        bar = tqdm(ordered, desc="CUDA graphs", leave=False, disable=None)
        with _garbage_collected_before():
            self._replays = {shape: capture(shape) for shape in bar}

    def __len__(self) -> int:
        return len(self._replays)

    def fit(self, shape: StepShape) -> StepShape | None:
        """Return the smallest captured shape that a step can be padded to; None if none fits."""
        if shape == StepShape.decodes(shape.num_seqs):
            fitting = [s for s in self._replays if s.num_decodes >= shape.num_decodes]
        elif shape == StepShape.chunk(shape.num_tokens):
            fitting = [s for s in self._replays if s == StepShape.chunk(s.num_tokens)]
            fitting = [s for s in fitting if s.num_tokens >= shape.num_tokens]
        else:
            return None
        return min(fitting, key=lambda s: s.num_tokens, default=None)

    def replay(self, shape: StepShape) -> Tensor:
        """Launch the captured step of `shape`; returns the tensor that its `Replay` returns."""
        return self._replays[shape]()


def capture_graph(run: Replay, pool: Any) -> Replay:
    """Capture the launches of `run` on buffers with fixed addresses; memory comes from `pool`.

    All kernels must be compiled already.
    """
    run()  # libraries initialize at the first call with a shape, which cannot be captured
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = run()
    finally:
        torch.cuda.set_stream(stream)  # torch leaves its capture stream set when a capture fails

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


@contextmanager
def _garbage_collected_before() -> Iterator[None]:
    """Collect garbage now, and not during the block.

    Otherwise Python could run the finalizer of an old graph during a capture, which invalidates
    the capture. Torch's own collection before each capture is off by default.
    """
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()

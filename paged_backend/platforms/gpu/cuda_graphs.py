"""The steps that are captured as CUDA graphs: one launch per step instead of one per kernel."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor
from tqdm import tqdm

from paged_backend.platforms.gpu.device import Replay
from paged_backend.values.options.scheduling import StepLimits

CHUNKS = (64, 128, 256, 512)
"""Captured numbers of prompt tokens; more of them take more time to compute than to launch."""

MAX_PROMPTS = 8
"""Prompts that a captured step has room for."""

DRAFTED_TOKENS = (16, 64, 128, 192, 256, 320, 384, 512)
"""Captured numbers of tokens of sequences with drafts, the tokens before their drafts included.

From about 200 tokens on, the time of a step grows with them, so that the gaps limit the cost of
padding.
"""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The number of elements of each buffer that a step uses.

    The decodes come first: each is a sequence with one token. The others are parts of prompts, and
    sequences with drafts, which sample a token after each of theirs.
    """

    num_tokens: int
    num_seqs: int
    num_samples: int
    num_decodes: int
    num_prompt_rows: int = 0  # rows with logits that are needed for prompt logprobs
    has_adapters: bool = False  # the kernels of adapters run, too

    @classmethod
    def decodes(cls, count: int) -> StepShape:
        """Return the shape of a step of sequences with one token and one sample each."""
        return cls(count, count, count, count)

    @classmethod
    def mixed(cls, num_decodes: int, num_prompt_tokens: int) -> StepShape:
        """Return the captured shape of decodes with parts of `MAX_PROMPTS` prompts."""
        num_seqs = num_decodes + MAX_PROMPTS
        return cls(num_decodes + num_prompt_tokens, num_seqs, num_seqs, num_decodes)

    @classmethod
    def drafted(cls, num_decodes: int, num_tokens: int) -> StepShape:
        """Return the captured shape of decodes with sequences of two or more tokens each."""
        num_seqs, num_rows = num_decodes + num_tokens // 2, num_decodes + num_tokens
        return cls(num_rows, num_seqs, num_rows, num_decodes)

    def has_room_for(self, step: StepShape) -> bool:
        """Return True if a step can be padded to this shape."""
        return (
            self.num_decodes >= step.num_decodes
            and self.num_seqs - self.num_decodes >= step.num_seqs - step.num_decodes
            and self.num_tokens - self.num_decodes >= step.num_tokens - step.num_decodes
            and self.num_samples >= step.num_samples
            and self.num_prompt_rows >= step.num_prompt_rows
            and self.has_adapters == step.has_adapters
        )


def decode_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to capture: 1, 2, 4, 8, then multiples of 16 with growing gaps.

    A batch is padded to the next size, so the gaps limit the cost of padding. ``max_num_seqs`` is
    always included.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, 513, 64), *range(1024, 4097, 512)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


def captured_shapes(limits: StepLimits) -> list[StepShape]:
    """Return the step shapes to capture: decodes alone, with short prompts, and with drafts.

    The numbers of decodes with prompts have larger gaps, because a step with prompts takes longer
    anyway, and each is combined with each number of prompt tokens. A prompt is short if a prefix
    hit covers most of it, or if it is the rest of a longer one.
    """
    max_num_seqs, max_num_tokens = limits.max_num_seqs, limits.max_num_batched_tokens
    decodes = decode_sizes(max_num_seqs)
    powers = [8 << shift for shift in range(10) if shift != 1]
    beside = [0, *(size for size in powers if size < max_num_seqs), max_num_seqs]
    shapes = [StepShape.decodes(size) for size in decodes]
    shapes += [
        StepShape.mixed(size, chunk)
        for size in beside
        for chunk in CHUNKS
        if chunk <= max_num_tokens
    ]
    return [*shapes, *_drafted_shapes(limits, beside)]


def _drafted_shapes(limits: StepLimits, beside: Sequence[int]) -> Iterator[StepShape]:
    """Yield the shapes with drafts that a step may need, because it fits in no smaller one.

    Args:
        limits: the limits of a step.
        beside: numbers of decodes without drafts.
    """
    if not limits.max_num_drafts:
        return
    most = limits.max_num_seqs + limits.max_num_drafts
    for fewer, size in pairwise([-1, *beside]):
        for less, count in pairwise([0, *DRAFTED_TOKENS]):
            if count <= limits.max_num_batched_tokens and fewer + 1 + less + 1 <= most:
                yield StepShape.drafted(size, count)


class StepGraphs:
    """Captured steps; a step is padded to a captured shape if one fits.

    Args:
        shapes: the shapes to capture.
        capture: captures a step of a shape.
    """

    def __init__(self, shapes: Iterable[StepShape], capture: Callable[[StepShape], Replay]) -> None:
        self._shapes = sorted(shapes, key=lambda shape: shape.num_tokens)
        # Largest first, so that the others reuse its memory.
        bar = tqdm(self._shapes[::-1], desc="CUDA graphs", leave=False, disable=None)
        with _garbage_collected_before():
            self._replays = {shape: capture(shape) for shape in bar}

    def __len__(self) -> int:
        return len(self._replays)

    def fit(self, step: StepShape) -> StepShape | None:
        """Return the smallest captured shape that a step can be padded to; None if none fits."""
        return next((shape for shape in self._shapes if shape.has_room_for(step)), None)

    def replay(self, shape: StepShape) -> Tensor:
        """Launch the captured step of `shape`; returns the tensor that its `Replay` returns."""
        return self._replays[shape]()


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

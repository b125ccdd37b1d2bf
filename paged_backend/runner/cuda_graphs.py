"""Steps of decodes captured as CUDA graphs: a launch for a step instead of one for each kernel."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Numbers of sequences to capture: 1, 2, 4, 8, then multiples of 16 that grow apart, the most.

    A batch is padded to the next one, so the gaps bound what padding costs.
    """
    sizes = [1, 2, 4, 8, *range(16, 257, 16), *range(320, 513, 64), *range(1024, 4097, 512)]
    return sorted({size for size in sizes if size < max_num_seqs} | {max_num_seqs})


class DecodeGraphs:
    """Graphs over one memory pool, captured largest first, so that the others fit into its memory.

    Args:
        max_num_seqs: the largest batch.
        run: launches a step of so many decodes on buffers that stay where they are, and returns
            the tensor with its tokens. Whatever it launches has been compiled already.
    """

    def __init__(self, max_num_seqs: int, run: Callable[[int], Tensor]) -> None:
        self._sizes = capture_sizes(max_num_seqs)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        pool = torch.cuda.graph_pool_handle()
        largest_first = self._sizes[::-1]
        for size in tqdm(largest_first, desc="CUDA graphs", leave=False, disable=None):
            run(size)  # what libraries set up at their first call of a shape is not capturable
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                tokens = run(size)
            self._graphs[size] = (graph, tokens)

    def padded(self, num_seqs: int) -> int:
        """The smallest captured batch that so many sequences fit into."""
        return self._sizes[bisect_left(self._sizes, num_seqs)]

    def replay(self, size: int) -> Tensor:
        """Launch a step of a captured size; its tokens [size]."""
        graph, tokens = self._graphs[size]
        graph.replay()
        return tokens

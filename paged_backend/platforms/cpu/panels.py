"""The form in which kernels on the CPU read a weight: panels of 16 outputs."""

from __future__ import annotations

from torch import Tensor

from paged_backend.platforms.cpu.tiles import LANES


def make_panels(weight: Tensor, depth: int, values_per_word: int = 1) -> Tensor:
    """Return a weight in panels [outputs / 16, depth / values_per_word, 16, values_per_word].

    They are not contiguous; see `WeightMemory`.

    Args:
        weight: [outputs, inputs].
        depth: the number of inputs with padding, a multiple of `values_per_word`.
        values_per_word: consecutive inputs of an output that lie together.
    """
    outputs, inputs = weight.shape
    num_panels = -(-outputs // LANES)
    padded = weight.new_zeros(num_panels * LANES, depth)
    padded[:outputs, :inputs] = weight
    words = padded.view(num_panels, LANES, depth // values_per_word, values_per_word)
    return words.transpose(1, 2)

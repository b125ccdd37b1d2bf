"""Which rows of a step are padding, for layers that know nothing of the step."""

from __future__ import annotations

from torch import Tensor


class StepRows:
    """The places of a step's tokens in the KV cache, which padding has none of.

    A mixture of experts would read weights for padding, because its rows choose other experts than
    the tokens do. Attention tells the places, and the experts of the same layer read them.

    Behind the last attention, layers compute other rows: those that are sampled. There, padding
    repeats the first row, and needs no more weights than it.

    Attributes:
        slots: [num_tokens] int64, negative for padding; None where the rows are not known. The
            same buffers in each replay of a graph.
    """

    slots: Tensor | None = None

    def enter(self, layer: int, last_layer: int, slots: Tensor) -> None:
        """Take note of the attention of a layer.

        Args:
            layer: its number.
            last_layer: the number of the last layer that keeps tokens.
            slots: [num_tokens] int64, the places of the step's tokens.
        """
        self.slots = slots if layer < last_layer else None

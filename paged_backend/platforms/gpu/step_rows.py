"""The padding of the running step, which the model runner shows to the experts of its layers."""

from __future__ import annotations

from torch import Tensor


class StepRows:
    """The places of a step's tokens in the KV cache, which padding has none of.

    A mixture of experts would read weights for padding, because its rows choose other experts than
    the tokens do. The model runner sets the places before a step, and the experts read them.

    Behind the last layer that mixes tokens, a model may compute only the rows that are sampled. The
    places are not known there. Padding repeats the first of these rows, and needs no more weights
    than it.

    Attributes:
        slots: [num_tokens] int64, negative for padding; None where the rows are not known. A graph
            captures the address of the buffer, which each step fills.
    """

    slots: Tensor | None = None

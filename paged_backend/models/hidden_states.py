"""The last hidden states of all tokens in the KV cache, which the MTP layer reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from paged_backend.models.attention import AttentionBackend, AttentionMetadata
from paged_backend.models.base import Model


class HiddenStates:
    """A hidden state for each slot of a block table, as a pool has keys and values.

    Until `resize`, there is only the null block.

    Args:
        block_size: tokens in a block.
        hidden_size: size of a hidden state.
        dtype: dtype of hidden states.
        device: where they are.
    """

    def __init__(
        self, block_size: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._block_size = block_size
        self._rows = torch.zeros(block_size, hidden_size, dtype=dtype, device=device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a hidden state."""
        return self._rows[0].nbytes

    def resize(self, num_blocks: int) -> None:
        """Allocate memory for `num_blocks` blocks; what was kept is lost."""
        self._rows = self._rows.new_zeros(num_blocks * self._block_size, self._rows.shape[1])

    def read(self, slots: Tensor) -> Tensor:
        """Return the hidden states [count, hidden_size] at `slots` [count] int64; -1: any one."""
        return self._rows[slots]

    def write(self, slots: Tensor, hidden: Tensor) -> None:
        """Keep `hidden` [count, hidden_size] at `slots` [count] int64; -1: in the null block."""
        self._rows.index_copy_(0, slots.clamp(min=0), hidden)

    def slots_after(self, meta: AttentionMetadata, rows: Tensor | None) -> Tensor:
        """Return the slots [count] int64 of the tokens after those of a step.

        Args:
            meta: the step, of a model with one group.
            rows: [count] int64, the tokens' rows in the step; None for all of them.
        """
        (table,), positions, size = meta.block_tables, meta.positions, self._block_size
        if rows is None:
            rows = torch.arange(len(positions), device=positions.device)
        sequences = torch.searchsorted(meta.query_start_loc[1:], rows.int(), right=True)
        after = positions[rows] + 1
        # Graphs are captured without sequences, and an idle step may fill its block tables. What
        # they compute goes to the null block.
        last_row, last_column = (length - 1 for length in table.shape)
        places = sequences.clamp(max=last_row), (after // size).clamp(max=last_column)
        return table[places].long() * size + after % size

    @contextmanager
    def protected(self, slots: Sequence[int]) -> Iterator[None]:
        """Restore the hidden states at some slots, whatever is written meanwhile."""
        kept = [(self._rows[slot], self._rows[slot].clone()) for slot in slots]
        yield
        for place, hidden in kept:
            place.copy_(hidden)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, each pair from the first to the second, in this order."""
        blocks = self._rows.view(-1, self._block_size, self._rows.shape[1])
        for source, target in pairs:
            blocks[target] = blocks[source]


class RecordedModel:
    """A model that keeps the last hidden states of all tokens; see `models.base.Model`.

    Args:
        model: the model, of which `forward` returns hidden states after the final norm.
        hidden: where they are kept.
        group: the number of the block table's group that their slots belong to.
    """

    def __init__(self, model: Model, hidden: HiddenStates, group: int) -> None:
        self.config = model.config
        self.max_model_len = model.max_model_len
        self.attention_layers = model.attention_layers
        self.state_layers = model.state_layers
        self.head = model.head
        self.compute_logits = model.compute_logits
        self._model = model
        self._hidden = hidden
        self._group = group

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        attention: AttentionBackend,
        meta: AttentionMetadata,
        logits_indices: Tensor | None,
    ) -> Tensor:
        """Run all layers for all tokens, see `Model.forward`."""
        hidden = self._model.forward(input_ids, attention, meta, None)
        self._hidden.write(meta.slot_mappings[self._group], hidden)
        return hidden if logits_indices is None else hidden[logits_indices]

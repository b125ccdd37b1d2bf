"""The interface between a model and the paged KV cache.

A model passes the queries, keys and values of one layer to an `AttentionBackend`. The backend owns
the KV pool: the tensors with the keys and values of all blocks. Block 0 is the null block. It pads
block tables, and no request depends on its contents.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paged_backend.models.layers import QKNorm
from paged_backend.models.linear import LinearMethod
from paged_backend.models.states import StatePool, StateStep
from paged_backend.values.kv_cache_groups import KVSizes
from paged_backend.values.windows import Window

_METADATA_DTYPES = {
    "positions": torch.int32,
    "query_start_loc": torch.int32,
    "seq_lens": torch.int32,
    "block_tables": torch.int32,
    "slot_mappings": torch.int64,
}


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The layout of one step's batch of prefill chunks and decodes.

    The step computes the last tokens of each sequence. For sequence `s`, they are the rows
    `query_start_loc[s]:query_start_loc[s + 1]` of the batch. The sequence then has `seq_lens[s]`
    tokens in total. On a CPU, the last sequences may have no rows; their other entries may be
    anything. All tensors are contiguous. Each KV cache group, in their order, has a separate
    block table and slot mapping. An entry of a block table may be anything if no token of the step
    sees a token of this block: the block may have another owner, so it must not be read.

    Raises:
        TypeError: a tensor has the wrong dtype or is not contiguous. Kernels read raw addresses.
    """

    query_start_loc: Tensor  # [num_seqs + 1] int32
    seq_lens: Tensor  # [num_seqs] int32, tokens in the cache, including this step's
    # For each group:
    block_tables: tuple[Tensor, ...]  # [num_seqs, max_blocks] int32, padded with block 0
    slot_mappings: tuple[Tensor, ...]  # [num_tokens] int64, block * block_size + offset; -1: none
    positions: Tensor  # [num_tokens] int32, position of each token in its sequence
    num_decodes: int  # number of leading sequences that have exactly one token in this step
    # Number of blocks that all decodes begin with in groups without a window, for a backend that
    # can read them once for all; 0 to read them for each one. Every decode has more tokens.
    num_shared_blocks: int = 0
    # [num_seqs, 2] int32, the slots of the states that each sequence reads and writes; None if no
    # layer keeps a state.
    state_slots: Tensor | None = None

    def __post_init__(self) -> None:
        for name, dtype in _METADATA_DTYPES.items():
            value = getattr(self, name)
            for tensor in value if isinstance(value, tuple) else (value,):
                if tensor.dtype != dtype or not tensor.is_contiguous():
                    raise TypeError(f"{name} must be contiguous and {dtype}, got {tensor.dtype}")

    @property
    def state_step(self) -> StateStep:
        """The rows of each sequence, for a layer that keeps a state.

        Raises:
            TypeError: the step has no slots for states.
        """
        if self.state_slots is None:
            raise TypeError("a step of a model with states has no slots")
        return StateStep(self.state_slots, self.query_start_loc, self.seq_lens, self.num_decodes)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """One attention layer of a model.

    Attributes:
        index: the layer's number in the model.
        num_heads: query heads.
        num_kv_heads: heads of the keys and values; a divisor of `num_heads`.
        head_dim: size of a head.
        scale: factor on the scores before the softmax.
        cos_sin_cache: [max_positions, head_dim] float32: for each position the cosines of
            head_dim / 2 angles, then their sines.
        window: the positions that a token sees; None for all up to its own.
        qk_norm: the norm of each head of the queries and keys; None for no norm.
        softcap: scores become softcap * tanh(score / softcap); None for no limit.
        sinks: [num_heads] float32, the score of an extra key without a value; None for no key.
        k_scale: [num_kv_heads] float32, the checkpoint's scale of keys that are stored in 8 bits:
            key = stored key * scale. None if the checkpoint has none.
        v_scale: the same for values.
        has_positions: whether a key ends with its position, see `models.alibi`; 8 bits cannot hold
            it.
        reader: the layer that reads the result, which may be in any form that it reads; None for
            the form that every layer reads.
        shared_with: the number of an earlier layer with the same window and sizes, that keeps the
            keys and values which this layer reads; None if it keeps its own.
    """

    index: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    cos_sin_cache: Tensor
    window: Window | None = None
    qk_norm: QKNorm | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    has_positions: bool = False
    reader: LinearMethod | None = None
    shared_with: int | None = None

    @property
    def kept(self) -> KVSizes:
        """What the layer keeps for each token, or reads of another layer."""
        return KVSizes(self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def keeps_tokens(self) -> bool:
        """True if the layer keeps keys and values itself."""
        return self.shared_with is None

    @property
    def keeper(self) -> int:
        """The number of the layer that keeps the keys and values."""
        return self.index if self.shared_with is None else self.shared_with


@dataclass(frozen=True, slots=True)
class LatentLayer:
    """One layer of latent attention, see `checkpoint.latent`.

    All heads attend to the same row of a token: its latent vector, then its rotary key. The latent
    vector is also the value.

    Attributes:
        index: the layer's number in the model.
        num_heads: query heads.
        rank: size of the latent vector.
        rotary_dim: size of the rotary key.
        scale: factor on the scores before the softmax.
        cos_sin_cache: [max_positions, rotary_dim] float32: for each position the cosines of
            rotary_dim / 2 angles, then their sines.
    """

    index: int
    num_heads: int
    rank: int
    rotary_dim: int
    scale: float
    cos_sin_cache: Tensor

    @property
    def window(self) -> None:
        """None: a token sees all positions up to its own."""
        return None

    @property
    def row_size(self) -> int:
        """The size of a row."""
        return self.rank + self.rotary_dim

    @property
    def kept(self) -> KVSizes:
        """What the layer keeps for each token."""
        return KVSizes(1, self.row_size, 0)


CachedLayer = AttentionLayer | LatentLayer
"""A layer that keeps something of each token in the KV pool."""


class AttentionBackend(ABC):
    """Owns the KV pool of all layers and computes attention over it.

    All layers of a model are of one kind, and a backend has the method for this kind only.

    Attributes:
        states: the states of sequences, which some layers keep; None if no layer does.
    """

    states: StatePool | None = None

    def cut_rows(self) -> None:
        """Take note that the layers compute only some rows of the step from now on."""
        return

    @property
    def open_states(self) -> StatePool:
        """The states, for a layer that keeps one.

        Raises:
            TypeError: there are none.
        """
        if self.states is None:
            raise TypeError("the backend was made for a model without states")
        return self.states

    def attend(self, layer: AttentionLayer, qkv: Tensor, meta: AttentionMetadata) -> Tensor:
        """Write the step's keys and values to the KV pool, and compute attention.

        Before that, applies `layer.qk_norm`, if it is set, and the rotary embedding to the queries
        and keys.

        Args:
            layer: the layer that calls.
            qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] in the model's dtype: the
                heads of the queries, then of the keys, then of the values. May be overwritten; its
                rows may have gaps between them. A layer that reads what another one keeps has the
                heads of the queries only.
            meta: the layout of the step.

        Returns:
            [num_tokens, num_heads * head_dim].
        """
        raise TypeError("this backend has no keys and values of heads")

    def attend_latent(
        self, layer: LatentLayer, q: Tensor, rows: Tensor, meta: AttentionMetadata
    ) -> Tensor:
        """Write the step's rows to the KV pool, and compute latent attention.

        Before that, applies the rotary embedding to the last `rotary_dim` numbers of all queries
        and rows.

        Args:
            layer: the layer that calls.
            q: [num_tokens, num_heads, row_size] in the model's dtype. May be overwritten.
            rows: [num_tokens, row_size] in the same dtype. May be overwritten.
            meta: the layout of the step.

        Returns:
            [num_tokens, num_heads, rank], the sums of latent vectors, in the model's dtype.
        """
        raise TypeError("this backend has no latent vectors")

    @abstractmethod
    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy each pair's first block over its second, in all layers."""

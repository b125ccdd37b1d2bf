"""Linear attention with a fixed decay for each head, as in MiniMax's lightning attention.

Qin et al., "Lightning Attention-2" (2024), section 3. `_states.py` and `_chunks.py` say what is
promised about the bits of results.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paged_kernels._chunks import check_lengths
from paged_kernels._decayed_scan import decayed_scan
from paged_kernels._rates import Rates
from paged_kernels._states import check_heads, check_pool, check_rows, check_step
from paged_kernels.device import device_of
from paged_kernels.dtypes import MODEL_DTYPES
from paged_kernels.errors import check_tensor


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    pool: Tensor,
    slots: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor | None = None,
    *,
    num_decodes: int = 0,
) -> Tensor:
    """Attend to the sums of earlier keys and values, in float32, rounded once.

    A row turns the state S of a head into exp(-slope) S + k v^T, and its result is S^T q, without a
    scale.

    Args:
        q: [num_tokens, heads, key_dim] bfloat16, float16 or float32. Its rows, and those of `k` and
            `v`, may be strided by multiples of 16 bytes.
        k: like `q`.
        v: [num_tokens, heads, value_dim], dtype of `q`.
        slopes: [heads] float32, not negative.
        pool: [num_slots, heads, key_dim, value_dim] bfloat16, float16 or float32; updated.
        slots: [num_seqs, 2] int32, the slot that a state is read from and the one that it is
            written to, which may be equal. Slot 0 is read as zeros.
        query_start_loc: [num_seqs + 1] int32; a sequence may have no rows, and then no state is
            written.
        seq_lens: [num_seqs] int32, the rows of each sequence in this and all earlier steps, for
            computing prompts in chunks; only read for sequences with several rows. With None, all
            rows are computed one by one: no bit depends on steps, and prompts take much longer.
        num_decodes: number of leading sequences with at most `FEW_ROWS` rows, which need no chunks;
            no length is read on the host.

    Returns:
        [num_tokens, heads, value_dim], dtype of `q`; zeros in rows of no sequence.

    Raises:
        ArgumentError: an argument has the wrong shape, dtype, device or layout.
    """
    check_rows("q", q, q, None, None, None, dtypes=MODEL_DTYPES)
    device = device_of("q", q)
    num_tokens, heads, key_dim = q.shape
    check_heads("q", q, q, num_tokens, heads, key_dim)
    check_heads("k", k, q, num_tokens, heads, key_dim)
    check_heads("v", v, q, num_tokens, heads, None)
    value_dim = v.shape[2]
    check_tensor("slopes", slopes, (heads,), torch.float32, like=q)
    check_pool(pool, q, heads, key_dim, value_dim)
    check_lengths(q, seq_lens, check_step(q, slots, query_start_loc), num_decodes)
    return decayed_scan(
        q, k, v, Rates(slopes), None, pool, slots, query_start_loc, seq_lens,
        keys_last=False, num_decodes=num_decodes, device=device,
    )  # fmt: skip

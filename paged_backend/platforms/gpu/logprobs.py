"""Computes log-probabilities with a kernel, from logits that sampling has not modified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from paged_kernels.logprobs import logprobs
from torch import Tensor

from paged_backend.platforms.gpu.transfer import Transfer
from paged_backend.sampling.logprobs import LogprobsSpec, rows, rows_with_logits
from paged_backend.values.beams import MAX_CANDIDATES
from paged_backend.values.outputs import TokenLogprobs
from paged_backend.values.sampling_params import MAX_LOGPROBS


class DeviceLogprobs:
    """Log-probabilities on their way from a device to the host.

    Args:
        logits: [n, vocab] of any dtype of models; only read.
        token_ids: [n] int32 on the same device.
        specs: what to return with each row.
        transfer: copies the result to the host.
    """

    def __init__(
        self, logits: Tensor, token_ids: Tensor, specs: Sequence[LogprobsSpec], transfer: Transfer
    ) -> None:
        self._specs = specs
        wanted = transfer.send(np.array([spec.num_top for spec in specs], np.int32))
        all_rows = torch.arange(len(specs), dtype=torch.int32, device=logits.device)
        # Two widths at most, so that few kernels are compiled: during warm-up, and for many beams.
        is_wide = any(spec.num_top > MAX_LOGPROBS for spec in specs)
        width = MAX_CANDIDATES if is_wide else MAX_LOGPROBS
        result = logprobs(logits, all_rows, token_ids, wanted, width)
        columns = result.sampled, result.ranks, result.top_tokens, result.top
        self._arrivals = [transfer.receive(column) for column in columns]
        with_logits = transfer.send(np.array(rows_with_logits(specs), np.int64))
        self._logits = transfer.receive(logits.index_select(0, with_logits).float())

    def wait(self) -> list[TokenLogprobs]:
        """Wait for the copy, and return one entry for each row."""
        columns = (arrival.wait() for arrival in self._arrivals)
        return list(rows(self._specs, *columns, logits=self._logits.wait_for_array()))

"""Computes log-probabilities on the host, from logits that sampling has not modified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from paged_backend.core.scheduled_batch import PromptLogprobsSpec, SampleSpec
from paged_backend.outputs import TokenLogprobs

# Prompt tokens in a chunk. The logits of a chunk are the largest tensor of a step.
ROWS_AT_ONCE = 256


class HostLogprobs:
    """Log-probabilities that are computed at once, on the host.

    Args:
        logits: [n, vocab] float32; only read.
        token_ids: [n] the tokens that were sampled, or that follow in the prompt.
        num_top: number of most likely tokens to return, for each row.
    """

    def __init__(self, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> None:
        logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max)
        logprobs = torch.log_softmax(logits, dim=1).nan_to_num(nan=-torch.inf)
        chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64).unsqueeze(1))
        ranks = (logprobs >= chosen).sum(1)
        width = min(max(num_top, default=0), logprobs.shape[1])
        top, top_ids = logprobs.topk(width, dim=1)
        columns = chosen.squeeze(1), ranks, top_ids, top
        self._rows = list(rows(num_top, *(column.tolist() for column in columns)))

    def wait(self) -> list[TokenLogprobs]:
        """Return one entry for each row."""
        return self._rows


def places_with_logprobs(samples: Sequence[SampleSpec]) -> list[int]:
    """Return the indexes of the samples that need log-probabilities."""
    return [place for place, spec in enumerate(samples) if spec.params.logprobs is not None]


def cut_prompts(specs: Sequence[PromptLogprobsSpec]) -> Iterator[tuple[list[int], list[int]]]:
    """Split the prompt tokens of all specs into chunks of at most ``ROWS_AT_ONCE`` tokens.

    Yields the token ids of each chunk and, in a second list, the ``num_top`` of each token.
    """
    token_ids = [token for spec in specs for token in spec.token_ids]
    num_top = [spec.num_top for spec in specs for _ in spec.token_ids]
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        yield token_ids[start : start + ROWS_AT_ONCE], num_top[start : start + ROWS_AT_ONCE]


def split_by_prompt(
    specs: Sequence[PromptLogprobsSpec], rows: list[TokenLogprobs]
) -> list[list[TokenLogprobs]]:
    """Group the rows of all prompt tokens by spec; returns one list for each spec."""
    ends = np.cumsum([len(spec.token_ids) for spec in specs], dtype=int).tolist()
    return [rows[end - len(spec.token_ids) : end] for spec, end in zip(specs, ends, strict=True)]


def rows(
    num_top: Sequence[int],
    logprobs: list[float],
    ranks: list[int],
    top_ids: list[list[int]],
    top: list[list[float]],
) -> Iterator[TokenLogprobs]:
    """Yield one entry for each row; each argument is a column with one element per row."""
    for count, logprob, rank, ids, values in zip(
        num_top, logprobs, ranks, top_ids, top, strict=True
    ):
        likeliest = [token for token in ids[:count] if token >= 0]  # there may be fewer
        yield TokenLogprobs(logprob, rank, likeliest, values[: len(likeliest)])

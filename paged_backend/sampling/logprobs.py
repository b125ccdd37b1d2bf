"""Computes log-probabilities on the host, from logits that sampling has not modified."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paged_backend.core.scheduled_batch import PromptLogprobsSpec, SampleSpec
from paged_backend.values.outputs import TokenLogprobs

# Prompt tokens in a chunk. The logits of a chunk are the largest tensor of a step.
ROWS_AT_ONCE = 256


class LogprobsSpec(NamedTuple):
    """What is returned with the log-probability of one token."""

    num_top: int  # number of most likely tokens
    with_logits: bool


class HostLogprobs:
    """Log-probabilities that are computed at once, on the host.

    Args:
        logits: [n, vocab] float32; only read.
        token_ids: [n] the tokens that were sampled, or that follow in the prompt.
        specs: what to return with each row.
    """

    def __init__(
        self, logits: Tensor, token_ids: Sequence[int], specs: Sequence[LogprobsSpec]
    ) -> None:
        with_logits = logits[rows_with_logits(specs)].numpy()
        logits = logits.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max)
        logprobs = torch.log_softmax(logits, dim=1).nan_to_num(nan=-torch.inf)
        chosen = logprobs.gather(1, torch.tensor(token_ids, dtype=torch.int64).unsqueeze(1))
        ranks = (logprobs >= chosen).sum(1)
        width = min(max((spec.num_top for spec in specs), default=0), logprobs.shape[1])
        top, top_ids = logprobs.topk(width, dim=1)
        columns = chosen.squeeze(1), ranks, top_ids, top
        values = (column.tolist() for column in columns)
        self._rows = list(rows(specs, *values, logits=with_logits))

    def wait(self) -> list[TokenLogprobs]:
        """Return one entry for each row."""
        return self._rows


def places_with_logprobs(samples: Sequence[SampleSpec]) -> list[int]:
    """Return the indexes of the samples that need log-probabilities."""
    return [
        place
        for place, spec in enumerate(samples)
        if spec.params.logprobs is not None or spec.num_candidates > 0
    ]


def specs_of_samples(samples: Sequence[SampleSpec]) -> list[LogprobsSpec]:
    """Return what each sample returns with its log-probability."""
    return [
        LogprobsSpec(spec.num_candidates or spec.params.logprobs or 0, spec.with_logits)
        for spec in samples
    ]


def rows_with_logits(specs: Sequence[LogprobsSpec]) -> list[int]:
    """Return the indexes of the rows that return their logits."""
    return [row for row, spec in enumerate(specs) if spec.with_logits]


def cut_prompts(
    prompts: Sequence[PromptLogprobsSpec],
) -> Iterator[tuple[list[int], list[LogprobsSpec]]]:
    """Split the tokens of all prompts into chunks of at most ``ROWS_AT_ONCE`` tokens.

    Yields the token ids of each chunk, and what is returned with each of them.
    """
    token_ids = [token for prompt in prompts for token in prompt.token_ids]
    specs = [
        LogprobsSpec(prompt.num_top, prompt.with_logits)
        for prompt in prompts
        for _ in prompt.token_ids
    ]
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        yield token_ids[start : start + ROWS_AT_ONCE], specs[start : start + ROWS_AT_ONCE]


def split_by_prompt(
    specs: Sequence[PromptLogprobsSpec], rows: list[TokenLogprobs]
) -> list[list[TokenLogprobs]]:
    """Group the rows of all prompt tokens by spec; returns one list for each spec."""
    ends = np.cumsum([len(spec.token_ids) for spec in specs], dtype=int).tolist()
    return [rows[end - len(spec.token_ids) : end] for spec, end in zip(specs, ends, strict=True)]


def rows(
    specs: Sequence[LogprobsSpec],
    logprobs: list[float],
    ranks: list[int],
    top_ids: list[list[int]],
    top: list[list[float]],
    *,
    logits: NDArray[np.float32],
) -> Iterator[TokenLogprobs]:
    """Yield one entry for each row.

    Each argument is a column with one element per row, but ``logits`` has only the rows of
    ``rows_with_logits``.
    """
    rest = iter(logits)
    for spec, logprob, rank, ids, values in zip(specs, logprobs, ranks, top_ids, top, strict=True):
        likeliest = [token for token in ids[: spec.num_top] if token >= 0]  # there may be fewer
        own_logits = next(rest).tobytes() if spec.with_logits else None
        yield TokenLogprobs(logprob, rank, likeliest, values[: len(likeliest)], own_logits)

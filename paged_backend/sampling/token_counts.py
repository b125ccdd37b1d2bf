"""Counts the tokens of a sequence as it grows, for its penalties."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from paged_backend.core.scheduled_batch import SampleSpec
from paged_backend.values.options.speculation import MAX_DRAFTS


class _Stack:
    """Distinct token ids, in an array that grows."""

    def __init__(self, token_ids: NDArray[np.int64]) -> None:
        self._ids = token_ids
        self._size = len(token_ids)

    def push(self, token: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(self._size + 16, np.int64)])
        self._ids[self._size] = token
        self._size += 1

    def pop(self) -> None:
        self._size -= 1

    def array(self) -> NDArray[np.int64]:
        return self._ids[: self._size]


class TokenCounts:
    """The tokens before the token to sample.

    Args:
        spec: a sample of the sequence; its earlier tokens are counted at once.
        vocab_size: number of token ids.
    """

    def __init__(self, spec: SampleSpec, vocab_size: int) -> None:
        prompt, output = np.split(np.array(spec.context, np.int64), [spec.num_prompt_tokens])
        in_prompt = np.zeros(vocab_size, np.bool_)
        in_prompt[prompt] = True
        # Twice the number of times in the output, plus 1 for a token of the prompt.
        self._counts = 2 * np.bincount(output, minlength=vocab_size).astype(np.int32) + in_prompt
        distinct, first = np.unique(output, return_index=True)
        produced = distinct[np.argsort(first)]  # in the order in which they came
        self._produced = _Stack(produced)
        new = produced[~in_prompt[produced]]
        self._seen = _Stack(np.concatenate([np.flatnonzero(in_prompt), new]))
        self._output = output.tolist()  # the output tokens that are counted, in their order

    def update(self, spec: SampleSpec) -> None:
        """Count the tokens before the sample.

        Tokens that were counted for an earlier sample may have been drafts. Those from the first
        wrong one on are taken back; a grammar may have forced other tokens after it.
        """
        while len(self._output) > spec.num_output_tokens:
            self._take_back()
        start = max(0, len(self._output) - MAX_DRAFTS)
        first = spec.num_prompt_tokens + start
        known = spec.token_ids[first : spec.num_prompt_tokens + len(self._output)]
        while self._output[start:] != known:
            self._take_back()
            known.pop()
        first = spec.num_prompt_tokens + len(self._output)
        for token in spec.token_ids[first : spec.position]:
            self._count(token)

    def seen(self) -> NDArray[np.int64]:
        """Return the distinct tokens of prompt and output."""
        return self._seen.array()

    def produced(self) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        """Return the distinct tokens of the output, and how often each is in it."""
        token_ids = self._produced.array()
        return token_ids, self._counts[token_ids] >> 1

    def _count(self, token: int) -> None:
        count = self._counts[token]
        if count == 0:
            self._seen.push(token)
        if count < 2:
            self._produced.push(token)
        self._counts[token] = count + 2
        self._output.append(token)

    def _take_back(self) -> None:
        # In reverse order: a token that was counted first is the last one of its stack.
        token = self._output.pop()
        count = self._counts[token] - 2
        if count == 0:
            self._seen.pop()
        if count < 2:
            self._produced.pop()
        self._counts[token] = count

"""Turns the model's answers to a row with beam search into the outputs of every interface.

Each response has all beams, in a dimension of their own. In a stream, it has all of their tokens so
far, in place of those of the response before it, as with tensorrtllm_backend.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from paged_backend.serving.tensorrtllm.arrays import Outputs, element
from paged_backend.serving.tensorrtllm.completions import Wishes, metrics_of, new_logprobs


@dataclass(slots=True)
class _Beam:
    """One beam so far."""

    text: bytes = b""
    token_ids: list[int] = field(default_factory=list)  # if they are needed
    num_tokens: int = 0
    logprobs: list[float] = field(default_factory=list)  # one for each token, if asked for


class Beams:
    """The beams of one row, the best first.

    Args:
        wishes: what the row asks for.
        block_size: number of tokens in a KV block.
    """

    def __init__(self, wishes: Wishes, block_size: int) -> None:
        self._wishes = wishes
        self._block_size = block_size
        self._beams: list[_Beam] = []

    def split(self, answer: Outputs) -> Iterator[tuple[Outputs, Outputs]]:
        """Yield the model's outputs for all beams so far, and the common outputs.

        In a stream, nothing is yielded if there is nothing new.
        """
        counts = answer["num_output_tokens"].tolist()
        has_news = self._add(answer, counts)
        if not has_news and self._wishes.is_stream:
            return
        lengths = [beam.num_tokens for beam in self._beams]
        mine = {
            **answer,
            "text_output": np.array([beam.text for beam in self._beams], np.object_),
            "num_output_tokens": np.array(lengths, np.uint32),
            "output_ids": np.array([i for beam in self._beams for i in beam.token_ids], np.int32),
        }
        common = {
            "sequence_index": element(0),
            "sequence_length": np.array([lengths], np.int32),
            **self._logprobs(answer),
            **metrics_of(answer, 0, lengths[0], self._block_size),
        }
        yield mine, common

    def _add(self, answer: Outputs, counts: list[int]) -> bool:
        """Add what is new to each beam; returns whether there is anything."""
        self._beams = self._beams or [_Beam() for _ in counts]
        texts = answer["text_output"].tolist()
        ends = np.cumsum(counts)[:-1]
        ids = np.split(answer["output_ids"], ends) if "output_ids" in answer else []
        for beam, count, text in zip(self._beams, counts, texts, strict=True):
            beam.text += text
            beam.num_tokens += count
        for beam, new_ids in zip(self._beams, ids, strict=False):
            beam.token_ids += new_ids.tolist()
        if self._wishes.with_logprobs:
            for index, beam in enumerate(self._beams):
                beam.logprobs += new_logprobs(answer, index)
        return any(counts) or any(texts)

    def _logprobs(self, answer: Outputs) -> Outputs:
        """Return the log-probabilities, padded with 0, and their sums."""
        if not self._wishes.with_logprobs:
            return {}
        longest = max(len(beam.logprobs) for beam in self._beams)
        padded = [beam.logprobs + [0.0] * (longest - len(beam.logprobs)) for beam in self._beams]
        return {
            "output_log_probs": np.array([padded], np.float32),
            "cum_log_probs": answer["cumulative_logprob"][None],
        }

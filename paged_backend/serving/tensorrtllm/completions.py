"""Turns the model's answers to one row into the outputs that every interface has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paged_backend.serving import fields
from paged_backend.serving.fields import Tensors
from paged_backend.serving.requests.answer import MOMENTS
from paged_backend.serving.requests.parsing import LOGITS
from paged_backend.serving.tensorrtllm.arrays import Outputs, element
from paged_backend.values.contract import TensorDeclaration

_BLOCKS = (
    *("kv_cache_alloc_new_blocks", "kv_cache_reused_blocks"),
    "kv_cache_alloc_total_blocks",
)
# Outputs of the model that have an entry for each new token of all completions.
_BY_TOKEN = ("output_ids", "generation_logits")
_DRAFTS = ("total_accepted_draft_tokens", "total_draft_tokens")

# Outputs that every interface has.
COMMON_OUTPUTS = (
    *(TensorDeclaration(name, "TYPE_INT32", 1) for name in ("batch_index", "sequence_index")),
    TensorDeclaration("sequence_length", "TYPE_INT32", -1),
    TensorDeclaration("cum_log_probs", "TYPE_FP32", -1),
    TensorDeclaration("output_log_probs", "TYPE_FP32", (-1, -1)),
    TensorDeclaration("context_logits", "TYPE_FP32", (-1, -1)),
    TensorDeclaration("generation_logits", "TYPE_FP32", (-1, -1, -1)),
    *(TensorDeclaration(name, "TYPE_INT32", 1) for name in (*_BLOCKS, *_DRAFTS)),
    *(TensorDeclaration(name, "TYPE_INT64", 1) for name in MOMENTS),
    TensorDeclaration("acceptance_rate", "TYPE_FP32", 1),
)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a row asks for, besides its answer."""

    is_stream: bool  # a response for each new part
    with_logprobs: bool
    logits: tuple[str, ...]
    with_metrics: bool

    @classmethod
    def of(cls, tensors: Tensors, *, is_stream: bool) -> Wishes:
        """Read the inputs of a row."""
        return cls(
            is_stream,
            fields.flag(tensors, "return_log_probs"),
            tuple(name for name in LOGITS if fields.flag(tensors, f"return_{name}")),
            fields.flag(tensors, "return_perf_metrics"),
        )

    @property
    def needed(self) -> set[str]:
        """The outputs of the model that ``split`` needs."""
        return {
            *("num_output_tokens", "num_input_tokens"),
            *(("logprobs", "cumulative_logprob") if self.with_logprobs else ()),
            *(("num_cached_tokens", "metrics") if self.with_metrics else ()),
            *self.logits,
        }


class Completions:
    """The completions of one row, each with separate responses.

    Args:
        wishes: what the row asks for.
        block_size: number of tokens in a KV block.
    """

    def __init__(self, wishes: Wishes, block_size: int) -> None:
        self._wishes = wishes
        self._block_size = block_size
        self._num_tokens: Counter[int] = Counter()  # by completion

    def split(self, answer: Outputs) -> Iterator[tuple[Outputs, Outputs]]:
        """Yield the model's new outputs for each completion, and the common outputs.

        In a stream, a completion without anything new is left out.
        """
        counts = answer["num_output_tokens"].tolist()
        ends = np.cumsum(counts)[:-1]
        by_token = {name: np.split(answer[name], ends) for name in _BY_TOKEN if name in answer}
        for index, count in enumerate(counts):
            self._num_tokens[index] += count
            mine = {
                name: array[index : index + 1] if array.shape == (len(counts),) else array
                for name, array in answer.items()
            }
            mine |= {name: parts[index] for name, parts in by_token.items()}
            common = {
                "sequence_index": element(index),
                "sequence_length": element(count),
                **self._logprobs(mine),
                **self._logits_of(mine),
                **metrics_of(answer, index, self._num_tokens[index], self._block_size),
            }
            if count or mine["text_output"][0] or not self._wishes.is_stream:
                yield mine, common

    def _logprobs(self, mine: Outputs) -> Outputs:
        if not self._wishes.with_logprobs:
            return {}
        return {
            "output_log_probs": np.array([[new_logprobs(mine, 0)]], np.float32),
            "cum_log_probs": mine["cumulative_logprob"].reshape(1, 1),
        }

    def _logits_of(self, mine: Outputs) -> Outputs:
        """Return logits with a dimension for the row and, for new tokens, one for beams."""
        shapes = {"context_logits": (1,), "generation_logits": (1, 1)}
        return {
            name: mine[name].reshape(*shapes[name], *mine[name].shape)
            for name in self._wishes.logits
        }


def new_logprobs(answer: Outputs, index: int) -> list[float]:
    """Return the log-probabilities of the new tokens of one completion."""
    entries = json.loads(fields.text("logprobs", answer["logprobs"][index]))
    return [next(iter(entry.values()))["logprob"] for entry in entries]


def metrics_of(answer: Outputs, index: int, num_tokens: int, block_size: int) -> Outputs:
    """Return the times of a completion, and its blocks and drafts so far, if they are known.

    Args:
        answer: the model's outputs.
        index: number of the completion.
        num_tokens: number of its tokens so far.
        block_size: number of tokens in a KV block.
    """
    if "metrics" not in answer:
        return {}
    found = json.loads(fields.text("metrics", answer["metrics"][index]))
    if not found:
        return {}
    # The last token of a sequence is never computed.
    num_computed = answer["num_input_tokens"].item() + num_tokens - 1
    num_blocks = -(-num_computed // block_size)
    num_reused = answer["num_cached_tokens"].item() // block_size
    blocks = zip(_BLOCKS, (num_blocks - num_reused, num_reused, num_blocks), strict=True)
    num_accepted, num_drafts = (found[name] for name in _DRAFTS)
    return {
        **{name: element(number) for name, number in blocks},
        **{name: element(found[name]) for name in _DRAFTS},
        **{name: element(found[name], np.int64) for name in MOMENTS},
        "acceptance_rate": element(num_accepted / max(1, num_drafts), np.float32),
    }

"""Turns the model's answers to one row into the outputs that every interface has."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

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


class Completions:
    """The completions of one row.

    Args:
        tensors: the row's inputs.
        is_stream: whether the row has a response for each new part.
        block_size: number of tokens in a KV block.
    """

    def __init__(self, tensors: Tensors, *, is_stream: bool, block_size: int) -> None:
        self._is_stream = is_stream
        self._block_size = block_size
        self._with_logprobs = fields.flag(tensors, "return_log_probs")
        self._logits = [name for name in LOGITS if fields.flag(tensors, f"return_{name}")]
        self._with_metrics = fields.flag(tensors, "return_perf_metrics")
        self._num_tokens: Counter[int] = Counter()  # by completion

    @property
    def needed(self) -> set[str]:
        """The outputs of the model that ``split`` needs."""
        return {
            *("num_output_tokens", "num_input_tokens"),
            *(("logprobs", "cumulative_logprob") if self._with_logprobs else ()),
            *(("num_cached_tokens", "metrics") if self._with_metrics else ()),
            *self._logits,
        }

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
                **self._metrics(index, mine, answer),
            }
            if count or mine["text_output"][0] or not self._is_stream:
                yield mine, common

    def _logprobs(self, mine: Outputs) -> Outputs:
        if not self._with_logprobs:
            return {}
        entries = json.loads(fields.string("logprobs", mine["logprobs"]))
        sampled = [next(iter(entry.values()))["logprob"] for entry in entries]
        return {
            "output_log_probs": np.array([[sampled]], np.float32),
            "cum_log_probs": mine["cumulative_logprob"].reshape(1, 1),
        }

    def _logits_of(self, mine: Outputs) -> Outputs:
        """Return logits with a dimension for the row and, for new tokens, one for beams."""
        shapes = {"context_logits": (1,), "generation_logits": (1, 1)}
        return {name: mine[name].reshape(*shapes[name], *mine[name].shape) for name in self._logits}

    def _metrics(self, index: int, mine: Outputs, answer: Outputs) -> Outputs:
        """Return the times of a completion, and its blocks and drafts so far."""
        found = json.loads(fields.string("metrics", mine["metrics"])) if self._with_metrics else {}
        if not found:
            return {}
        num_accepted, num_drafts = (found[name] for name in _DRAFTS)
        # The last token of a sequence is never computed.
        num_computed = answer["num_input_tokens"].item() + self._num_tokens[index] - 1
        num_blocks = -(-num_computed // self._block_size)
        num_reused = answer["num_cached_tokens"].item() // self._block_size
        blocks = zip(_BLOCKS, (num_blocks - num_reused, num_reused, num_blocks), strict=True)
        return {
            **{name: element(number) for name, number in blocks},
            **{name: element(found[name], np.int64) for name in MOMENTS},
            **{name: element(found[name]) for name in _DRAFTS},
            "acceptance_rate": element(num_accepted / max(1, num_drafts), np.float32),
        }

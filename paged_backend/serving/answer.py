"""One open call: turns the engine's tokens into responses that carry only what is new."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from paged_backend.outputs import FinishReason, SequenceOutput
from paged_backend.serving.contract import Array
from paged_backend.serving.parsing import ParsedRequest
from paged_backend.text.text_stream import TextStream
from paged_backend.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Branch:
    """One of the n answers to a call, and what of it has not been sent yet."""

    stream: TextStream
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None


class Answer:
    """Collects what is new until it is taken as one response.

    A stream that falls behind the engine therefore gets fewer and larger responses.
    """

    def __init__(self, parsed: ParsedRequest, tokenizer: Tokenizer) -> None:
        self.request = parsed.request
        self._options = parsed.options
        self._prompt_text = parsed.prompt_text
        self._branches = [
            Branch(TextStream(tokenizer, parsed.request.params))
            for _ in range(parsed.request.params.n)
        ]

    def append(self, output: SequenceOutput) -> bool:
        """Add a step's output; returns whether a stop string ended the branch before the engine."""
        branch = self._branches[output.index]
        if branch.finish_reason is not None:
            return False  # computed before the engine heard of the stop string
        delta = branch.stream.append(output.new_token_ids, output.finish_reason)
        branch.text.append(delta.text)
        branch.token_ids += delta.token_ids
        branch.finish_reason = delta.finish_reason
        return delta.finish_reason is not None and output.finish_reason is None

    @property
    def is_finished(self) -> bool:
        """Whether all branches have ended."""
        return all(branch.finish_reason is not None for branch in self._branches)

    @property
    def is_due(self) -> bool:
        """Whether a response should be sent now."""
        return self._options.stream or self.is_finished

    def take(self) -> dict[str, Array]:
        """The output tensors of the next response; what they hold is not held any more."""
        options, branches = self._options, self._branches
        tensors = {"text_output": _strings(self._prompt_text + "".join(b.text) for b in branches)}
        if options.return_finish_reason:
            tensors["finish_reason"] = _strings(str(b.finish_reason) for b in branches)
        if options.return_num_input_tokens:
            tensors["num_input_tokens"] = np.asarray(len(self.request.prompt_token_ids), np.uint32)
        if options.return_num_output_tokens:
            counts = [len(b.token_ids) for b in branches]
            tensors["num_output_tokens"] = np.array(counts, np.uint32)
        if options.return_output_ids:
            ids = [token for b in branches for token in b.token_ids]
            tensors["output_ids"] = np.array(ids, np.int32)
        for branch in branches:
            branch.text.clear()
            branch.token_ids = []
        return tensors


def _strings(values: Iterable[str]) -> Array:
    return np.array([value.encode() for value in values], dtype=np.object_)

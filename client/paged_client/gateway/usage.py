"""Counts the tokens of a request."""

from __future__ import annotations

from collections.abc import Sequence

from paged_client import Chunk, Completion, PredictionTokens


class Usage:
    """Token counts of a request so far, over all of its prompts."""

    def __init__(self, counts_output: bool = True) -> None:
        self._counts_output = counts_output
        self._prompts: dict[int, tuple[int, int]] = {}  # number of tokens and of cached tokens
        self._num_output_tokens = 0
        # By prompt and completion: tokens of a prediction.
        self._predicted: dict[tuple[int, int], PredictionTokens] = {}

    def count(self, prompt: int, chunk: Chunk) -> None:
        """Count the tokens of a chunk of one of the prompts."""
        self.count_prompt(prompt, chunk)
        if self._counts_output:
            self._num_output_tokens += chunk.num_output_tokens
        if chunk.prediction_tokens is not None:
            self._predicted[prompt, chunk.index] = chunk.prediction_tokens

    def count_prompt(self, prompt: int, chunk: Chunk) -> None:
        """Count the tokens of one of the prompts."""
        self._prompts[prompt] = (chunk.num_input_tokens, chunk.num_cached_tokens)

    def count_all(self, completions: Sequence[Completion]) -> None:
        """Count the tokens of whole completions, one for each prompt."""
        for prompt, completion in enumerate(completions):
            self._prompts[prompt] = (completion.num_input_tokens, completion.num_cached_tokens)
            if self._counts_output:
                self._num_output_tokens += completion.num_output_tokens
            for index, answer in enumerate(completion.answers):
                if answer.prediction_tokens is not None:
                    self._predicted[prompt, index] = answer.prediction_tokens

    @property
    def num_input_tokens(self) -> int:
        """Tokens of the prompts."""
        return sum(tokens for tokens, _ in self._prompts.values())

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompts that the prefix cache had."""
        return sum(cached for _, cached in self._prompts.values())

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return self._num_output_tokens

    @property
    def prediction_tokens(self) -> PredictionTokens | None:
        """Tokens of predictions; None if no request had a prediction."""
        if not self._predicted:
            return None
        found = self._predicted.values()
        return PredictionTokens(sum(x.accepted for x in found), sum(x.rejected for x in found))
